"""Job -> artifact, one toolchain a file: `exported` (source to programs) and `aoti` (program to package).

Each has `compile(job, store) -> record`: the job and the record are JSON, files are named by digest in the store.
`worker.JOBS` is the table of toolchains. What they share of the user's model and its shapes lies beside them.
"""
