import os, torch, torch.distributed as dist
from tests.distributed.parallel_models import *
from tests.distributed import parallel_truth as oracle
from tests.distributed.parallel_jobs import assert_continues
from tests.distributed.model import close
def go(a):
    for s in a["setups"]:
        p = Parallel(**s)
        e = build(p, seed=8)
        folder = f"/tmp/parallel_ckpts/{folder_name(p)}"
        truth = torch.load(os.path.join(folder, "truth.pt"), weights_only=False)
        e.load_checkpoint(folder)
        notes = []
        for f in (lambda: oracle.compare(e, p, truth, "ds"), lambda: assert_continues(e, p, truth, 1e-6, "ds")):
            try: f()
            except AssertionError as error: notes.append(str(error)[:300])
        if dist.get_rank() == 0:
            print("RESULT", p.name, notes, file=open("/tmp/pdbg/results", "a"))
        close(e)
