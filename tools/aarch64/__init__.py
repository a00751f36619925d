"""The light install on aarch64, which Grace is: natively there, elsewhere under an emulator
(``make aarch64-test``).
"""
