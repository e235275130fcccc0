"""What the process that trains is made of: task, data, trainer and tensors, and how it is spoken to.

Laws, tested: it imports nothing but the standard library, numpy, torch and itself, and Python 3.8 can run it. So it
also runs under an interpreter that has nothing of ours (`thinwire client start --python`); simulation, `task check` and
`run` use the same modules in their own process.
"""
