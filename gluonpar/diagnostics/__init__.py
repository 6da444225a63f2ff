"""Whether training here is right (verify), what is installed (doctor), how fast an all-reduce is.

Nothing is imported here: the doctor must work where MXNet does not.
"""
