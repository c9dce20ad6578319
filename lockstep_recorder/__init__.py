"""Records a user's program, and runs it on given weights: numpy and the user's framework alone.

Nothing here imports another package of ours, so that it runs under any interpreter that runs the
user's program; `lockstep record --export FILE` writes it as one file.
"""
