"""Attacks on real commands by another user of the machine, by hostile models and data, and by
faults: each finding of our own attack on the program, as a program that tells whether it works.

    python -m benchmarks.attacks                            # all of them: more than an hour
    python -m benchmarks.attacks --only n8 --only 15a       # a finding, and one attack
    python -m benchmarks.attacks --only 1 --times 2         # races, each tried twice

The table has a row for each. HELD: the program refused or survived it. SUCCEEDED: that is a bug,
which gets a test in ``tests/security`` before it is mended. BROKEN: the attack itself failed, so
that nothing is known. SKIPPED: this machine cannot try it.

Without root all are skipped, because only root can start processes of two users. So they are where
those users can read neither this Python nor the checkout. ``4`` needs ccache, ``3a`` and ``3b`` a C
compiler, the accidents (50) ``mount``, and ``n13`` a ``/tmp`` with access control lists.

Let nothing else run meanwhile. Limits of time and memory (11, 13, 15, 50) are judged by what is
used, and a busy host uses more. The races of whole commands (1a to 1f, 2a, 2b, 3a, 3b, 5c) take up
to two minutes a try; the storms (1g, 2c, 3c, 5d, 7d, 9i) try a border 200 times in one minute.

A new attack must be able to fail: take out the border that it tries, and see it succeed.
"""
