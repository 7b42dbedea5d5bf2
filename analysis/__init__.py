"""Numbers only: what measurements say, what to measure next, what to choose, how to show it. Never torch or submitit.

Nothing is imported here, so that each part costs only what it needs itself.

Raises: ImportError: The folder was imported under its bare name `analysis`, which would make a
    second copy of every class.
"""

if __name__ != "tula_hpc.analysis":
    raise ImportError(f"import this package as tula_hpc.analysis, not as {__name__}")
