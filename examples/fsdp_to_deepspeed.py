"""A DeepSpeed job that goes on with what FSDP2 saved (examples/fsdp.py), and the other way round after a conversion.

torchrun --nproc_per_node 3 examples/fsdp_to_deepspeed.py --steps 8 --resume_from run/step-4 --save_to saved
elastic-ckpt convert --to dcp saved run/step-8
torchrun --nproc_per_node 2 examples/fsdp.py --steps 12 --resume_from run/step-8
"""

from __future__ import annotations

import deepspeed
from fsdp import ADAMW, GLOBAL_BATCH, arguments, build, loss_of, show

import elastic_ckpt

CONFIG = {
    "train_batch_size": GLOBAL_BATCH,
    "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,  # else, on CPU, DeepSpeed compiles an Adam of its own
    "gradient_clipping": 0.0,  # DeepSpeed clips to 1.0 unless it is told otherwise, and FSDP2 does not clip
}


def main() -> None:
    """Train to a step, and save."""
    options = arguments(__doc__)
    elastic_ckpt.install()
    model = build()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    if options.resume_from:
        engine.load_checkpoint(options.resume_from)
    for step in range(engine.global_steps + 1, options.steps + 1):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        show(step, loss)
    if options.save_to:
        engine.save_checkpoint(options.save_to)


if __name__ == "__main__":
    main()
