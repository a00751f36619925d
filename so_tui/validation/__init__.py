"""``so-tui validate``: small measurements of this machine and of training on it, beside what plans
predict, as one report.
"""
