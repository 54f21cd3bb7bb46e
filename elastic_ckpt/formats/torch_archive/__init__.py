"""A reader of ``torch.save`` files that needs neither torch nor DeepSpeed: directory, object tree, offsets of tensors.

Files are untrusted. Attack surface, and what bounds it (``tests/attacks`` tries each):

- A pickle names a function or class: only the closed list of :mod:`.globals`, functions of this package, or what the
  user allowed. Nothing is imported, no class of another package is called, no attribute is set on a class or function.
- BUILD: only namespaces, ordered dicts and stand-ins take a state, and it must be a dictionary that hides no method.
- Extension codes, out-of-band buffers, Python 2 instances, DUP and POP are no opcodes of plain data: refused.
- Claimed lengths, counts and memo indices: compared with the bytes that are there; the memo is a dict.
- Long integers and digits: at most 1 KiB. Keys: plain and small, so that hashing and comparing them is bounded.
- Depth, cycles and exponential sharing: :func:`.tree.check_tree`. The interpreter itself does not recurse.
- The pickle: at most 1 GiB, CRC32 checked. The directory: entries fill it exactly, names are unique.
- A tensor must be inside its storage, a storage inside its record, a record inside the file.
"""
