"""Local training: the task, its data, the model, the trainer, and the worker process that runs them.

Invariants, tested: these modules import nothing but the standard library, numpy, torch and each other, and Python 3.8
can run them. So the worker also runs under an interpreter in which Thinwire is not installed (`thinwire client start
--python`). Simulation, `task check` and `run` use the same modules in their own process.
"""
