"""A reader of ``torch.save`` files that needs neither torch nor DeepSpeed: directory, object tree, offsets of tensors.

Files are untrusted. Attack surface, and what bounds it (``tests/attacks`` tries each, and mutated files):

- A pickle names a function or class: only those of the closed list of :mod:`.globals` are called, which are this
  package's own. Objects of a few classes, and what the user allowed by ``torch.serialization.add_safe_globals``, are
  recorded (:mod:`.calls`); :mod:`..objects` makes them where their result is wanted. Any other name is an error: of the
  whole file in what this package reads, and of one entry in the client state. Nothing is imported, no attribute is set
  on a class or function.
- ``getattr`` makes members of listed enums, no more. Names of Python 2 are translated before they are looked up.
- BUILD: only namespaces, ordered dicts and objects of listed classes take a state: a dictionary of attributes that hide
  no method and mean nothing to Python; arrays and dtypes one of numbers, strings and dates (:mod:`.checks`).
- Extension codes, out-of-band buffers, instances of Python 2, DUP, text persistent ids, protocols 0 and 1: refused.
- Claimed lengths, counts and memo indices: compared with the bytes that are there. Numbers: at most 1 KiB.
- Keys: :func:`.calls.check_key`; few that can be made to collide. Integers below 2 ** 60 are not counted among these:
  a file computed for that end can make a large dictionary of them slow.
- Arguments that are shared by many calls: what calls may copy is counted. Error messages never print a container.
- Depth, cycles and exponential sharing: :func:`.tree.check_tree`, but for the client state, which is copied without
  recursion, each object once. The interpreter itself does not recurse.
- The pickle: at most 64 MiB or an eighth of its file, and 1 GiB; its CRC32 checked. What its objects take of memory,
  and what is made of them, is charged before it is taken (:mod:`.charges`): 8 times the file's size, or 2 GiB.
- What is beyond a limit of ours is an :class:`~elastic_ckpt.errors.UnsupportedError`, which says so: no damage.
- The directory: at most 256 MiB, entries fill it exactly, names and headers are unique, records do not overlap. Local
  headers and CRC32s of tensors are not read here: a load that verifies, and ``verify``, do.
- A tensor must be inside its storage, a storage inside its record, a record inside the file. A storage has one size,
  and is read once for all tensors that share it.
- Anything but a regular file is missing; a file that shrinks is damaged.
- With ``trust_pickle`` none of this holds for what a pickle names: it runs. Limits of numbers,
  names, containers that are being filled, copies and memory do not hold either.
"""
