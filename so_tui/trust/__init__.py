"""Handle files and text that other people may have written: who owns a file, how much of it is
read, and how its text is shown.

SECURITY.md says who is trusted with what.
"""
