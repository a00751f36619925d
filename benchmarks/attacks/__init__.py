"""Attacks on real commands by another user of the machine, by hostile models and data, and by
faults: each finding of our own attack on the program, as a program that tells whether it works.
"""
