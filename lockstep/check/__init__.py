"""`lockstep check`: is a user's port right, and if not, what is wrong?"""

from lockstep.check.compare import assert_equivalent as assert_equivalent
