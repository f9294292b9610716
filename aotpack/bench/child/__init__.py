"""What runs in the fresh processes of a bench: one sample, what fills caches, and the comparison of answers.

`__main__.py` is run as a script. Every room imports nothing but the standard library until its job runs, so that a
phase of a sample holds what its own way of starting imports, and no more.
"""
