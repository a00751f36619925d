"""What other people could have written: whose a file is, how much of it is read, and how its text is shown.

SECURITY.md says who is trusted with what.
"""
