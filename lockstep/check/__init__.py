"""`lockstep check`: is a user's port right, and if not, what is wrong?"""
