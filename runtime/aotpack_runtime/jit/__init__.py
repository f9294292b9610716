"""Behind a miss: what was seen of it, whether a compile pays, the child that compiles, and where the result is kept.

    observed.py   calls and seconds by shape, bounded
    decide.py     is it worth a compile? pure
    request.py    a call that missed -> what to compile; pure
    budget.py     how many, how often, and when to stop trying
    flight.py     one compile of a thing at a time, on the whole host
    compile.py    the builder as a child process, with limits of its own
    overlay.py    variants compiled on this host, shared by its processes
    watch.py      all of it for one entry;  service.py  for a session

Nothing here imports torch or the builder: compilers run in a child, and tensors are looked at by `loaders.samples`.
"""
