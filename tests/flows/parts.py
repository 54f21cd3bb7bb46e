"""What flows choose from, by name: optimizers, lr schedulers, client states, sections of the config, arguments.

Optimizers of packages that are not installed are left out.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import importlib.util
import pathlib
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler as schedulers

from tests.distributed.model import _TORCH, PRECISIONS
from tests.distributed.unchanged_jobs import ODD_STATES, OddScheduler
from tests.flows.draw import Choices, EngineFlow, Flow, TrainerFlow
from tests.flows.models import MODELS

#: Module and class of optimizers outside torch.
_PACKAGED = {
    "cpuadam": "deepspeed.ops.adam:DeepSpeedCPUAdam",
    "unknown": "tests.distributed.custom_optimizers:Wanderer",
    "apex": "tests.distributed.custom_optimizers:FusedAdam",
    "transformers.Adafactor": "transformers.optimization:Adafactor",
    **{f"bnb.{name}": f"bitsandbytes.optim:{name}" for name in ("AdamW8bit", "Adam", "Lion8bit", "AdEMAMix8bit")},
    "prodigyopt": "prodigyopt:Prodigy",
    **{f"schedulefree.{name}": f"schedulefree:{name}ScheduleFree" for name in ("AdamW", "SGD", "RAdam")},
    "lion_pytorch": "lion_pytorch:Lion",
    "came_pytorch": "came_pytorch:CAME",
    "galore_torch": "galore_torch:GaLoreAdamW",
    "adopt_pytorch": "adopt_pytorch:ADOPT",
    **{f"dadaptation.{name}": f"dadaptation:DAdapt{name}" for name in ("Adam", "SGD", "Lion", "AdaGrad", "Adan")},
    **{f"optimi.{name}": f"optimi:{name}" for name in ("Adan", "Lion", "StableAdamW", "Ranger", "SGD", "RAdam")},
}
#: They would need a model, a closure, or two calls for each step.
_OTHER_STEPS = frozenset(
    {"lbfgs", "alig", "bsam", "lomo", "adalomo", "adammini", "muonclip", "distributedmuon", "demo"}
)


def _pytorch_optimizers() -> dict[str, str]:
    if importlib.util.find_spec("pytorch_optimizer") is None:
        return {}
    names = sorted(importlib.import_module("pytorch_optimizer").get_supported_optimizers())
    return {f"pytorch_optimizer.{name}": name for name in names if name not in _OTHER_STEPS}


PYTORCH_OPTIMIZERS = _pytorch_optimizers()
_ABSENT = {at for at in _PACKAGED.values() if importlib.util.find_spec(at.partition(".")[0].partition(":")[0]) is None}
OPTIMIZERS = (
    *(name for name in _TORCH if name not in ("diary",)),
    *(name for name, at in _PACKAGED.items() if at not in _ABSENT),
    *PYTORCH_OPTIMIZERS,
)


def build_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of a flow, over param groups that have a rate and weight decay of their own."""
    if name in _TORCH:
        return _TORCH[name](groups)
    if name in PYTORCH_OPTIMIZERS:
        load = importlib.import_module("pytorch_optimizer").load_optimizer
        return load(PYTORCH_OPTIMIZERS[name])([{"params": group["params"]} for group in groups])
    module, _, kind = _PACKAGED[name].partition(":")
    make = getattr(importlib.import_module(module), kind)
    if module.startswith(("prodigyopt", "dadaptation", "transformers")):  # a rate of their own
        groups = [{key: value for key, value in group.items() if key != "lr"} for group in groups]
    if module.startswith("came"):  # three betas
        groups = [{key: value for key, value in group.items() if key != "betas"} for group in groups]
    optimizer = make(groups, lr=1e-3) if module.startswith(("bits", "optimi")) else make(groups)
    if hasattr(optimizer, "args") and hasattr(optimizer.args, "min_8bit_size"):
        optimizer.args.min_8bit_size = 256
    if module == "schedulefree":
        optimizer.train()
    return optimizer


def _halving(step: int) -> float:
    return 0.5 ** (step // 3)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: schedulers.StepLR(optimizer, step_size=3, gamma=0.5),
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, _halving),
    "multi step": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5]),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9),
    "restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 1e-3, 1e-2, cycle_momentum=False),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "chained": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
    **{f"state: {kind}": functools.partial(OddScheduler, kind=kind) for kind in ODD_STATES},
}


def _shared() -> dict[str, Any]:
    whole = torch.arange(12.0)
    return {"whole": whole, "view": whole[3:7], "strided": whole.view(3, 4).t(), "again": whole}


def _endless() -> dict[str, Any]:
    state: dict[str, Any] = {"list": []}
    state["list"].append(state["list"])
    return {"endless": state}


def _deep() -> dict[str, Any]:
    state: Any = "bottom"
    for _ in range(200):
        state = [state]
    return {"deep": state}


CLIENTS: dict[str, Callable[[], dict[Any, Any]]] = {
    "none": dict,
    "plain": lambda: {
        "epoch": 3,
        "note": "hello",
        "ratio": 0.5,
        "none": None,
        "raw": b"x",
        "flag": True,
        "huge": 10**40,
    },
    "keys": lambda: {0: "zero", (1, "a"): "pair", None: "none", 2.5: "float", True: "yes", b"k": "bytes"},
    "containers": lambda: {"a": OrderedDict(b={1, 2}), "c": frozenset({3}), "d": (1, [2, {"e": ()}])},
    "counters": lambda: {"counter": Counter("hello"), "args": argparse.Namespace(lr=0.1, names=["a"])},
    "collections": lambda: {"default": defaultdict(list, a=[1]), "queue": deque([1, 2], maxlen=3)},
    "numbers": lambda: {"complex": 1j, "inf": float("inf"), "decimal": Decimal("1.5"), "slice": slice(1, 2)},
    "times": lambda: {"at": datetime.datetime(2026, 1, 2), "path": pathlib.PurePosixPath("/a"), "id": uuid.UUID(int=7)},
    "numpy": lambda: {"array": np.arange(6).reshape(2, 3), "scalar": np.float32(1.5), "text": np.array(["a", "bc"])},
    "numpy state": lambda: {"rng": np.random.RandomState(3).get_state(), "kind": np.dtype("int16")},
    "random state": lambda: {"rng_state": torch.get_rng_state(), "python": __import__("random").Random(3).getstate()},
    "tensors": lambda: {
        "int": torch.arange(5),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "bool": torch.tensor(True),
    },
    "torch": lambda: {"dtype": torch.int8, "device": torch.device("cpu"), "size": torch.Size([1, 2])},
    "parameters": lambda: {"parameter": torch.nn.Parameter(torch.ones(3)), "leaf": torch.ones(2, requires_grad=True)},
    "shared": _shared,
    "sparse": lambda: {"sparse": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr()},
    "meta": lambda: {"meta": torch.empty(4, device="meta"), "conjugated": torch.tensor([1j, 2j]).conj()},
    "quantized": lambda: {"q": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 2, torch.quint8)},
    "endless": _endless,
    "deep": _deep,
    "partial": lambda: {"partial": functools.partial(int, base=2)},
}
#: What weights-only readers refuse, too.
UNSAFE = frozenset({"collections", "numbers", "times", "numpy", "numpy state", "partial", "endless", "deep"})

ZERO: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((0, 1, 2, 3), {}),
    "offload": ((1, 2, 3), {"offload_optimizer": {"device": "cpu"}}),
    "offload all": ((3,), {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
    "sub groups": ((3,), {"sub_group_size": 150, "stage3_param_persistence_threshold": 0}),
    "round robin": ((1, 2), {"round_robin_gradients": True}),
    "all reduce": ((1, 2), {"reduce_scatter": False, "contiguous_gradients": False}),
    "gather weights": ((3,), {"stage3_gather_16bit_weights_on_model_save": True}),
    "alignment": ((1, 2), {"parameter_alignment": True}),
}
CONFIG: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "accumulated over 3": {"gradient_accumulation_steps": 3},
    "clipped": {"gradient_clipping": 0.1},
    "not zipped": {"checkpoint": {"checkpoint_serialization": False}},
    "node local": {"checkpoint": {"use_node_local_storage": True}},
    "python writer": {"checkpoint": {"writer": {"type": "python"}}},
    "prescaled": {"prescale_gradients": True},
    "warmup": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
}
#: Arguments of ``load_checkpoint``. Without ``load_lr_scheduler_states``, whose loads leave other rates than DeepSpeed's.
LOADS: dict[str, dict[str, Any]] = {
    "all": {},
    "no states": {"load_optimizer_states": False},
    "module only": {"load_module_only": True},
    "not strict": {"load_module_strict": False},
}


#: Of Transformers' ``OptimizerNames``, those that a CPU has, some with packages that may not be there.
_OPTIMS = ("adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop", "adamw_bnb_8bit", "lion_8bit", "ademamix", "lomo")
_OPTIMS += ("schedule_free_adamw", "stable_adamw", "galore_adamw", "apollo_adamw", "grokadamw", "adamw_torch_8bit")


def choices(kind: type[Flow], every: bool = True) -> Choices:
    """The choices on each axis; without ``every``, the hundred rarest optimizers are left out."""
    if kind is TrainerFlow:
        return {
            "ranks": (1, 2),
            "stage": (0, 1, 2, 3),
            "optim": _OPTIMS,
            "scheduler": (
                "linear",
                "cosine",
                "constant",
                "cosine_with_restarts",
                "inverse_sqrt",
                "reduce_lr_on_plateau",
            ),
            "accumulation": (1, 2, 3),
            "best": (False, True),
            "config": ("trainer", "auto"),
            "bf16": (False, True),
            "lora": (False, True),
        }
    return {
        "ranks": (1, 2, 3),
        "stage": (0, 1, 2, 3),
        "precision": tuple(PRECISIONS),
        "optimizer": tuple(name for name in OPTIMIZERS if every or name not in PYTORCH_OPTIMIZERS),
        "scheduler": tuple(SCHEDULERS),
        "client": tuple(CLIENTS),
        "model": tuple(MODELS),
        "zero": tuple(ZERO),
        "config": tuple(CONFIG),
        "groups": ("one", "several", "split"),
        "loads": tuple(LOADS),
        "trained": (0, 2),
        "pending": (0, 1),
    }


def is_possible(flow: Flow) -> bool:
    """Whether DeepSpeed can do it, as far as is known beforehand; what fails with DeepSpeed alone counts for nothing."""
    if not isinstance(flow, EngineFlow):
        return True
    if flow.stage not in ZERO[flow.zero][0] or (flow.pending and "accumulated" not in flow.config):
        return False
    if flow.config == "prescaled" and flow.stage > 1:
        return False
    if "masters" in flow.precision and not (flow.stage and flow.optimizer == "cpuadam" and "offload" in flow.zero):
        return False
    # it loads no optimizer, and leaves masters behind that undo the loaded weights, or loads nothing at all
    return not (flow.loads in ("no states", "module only") and flow.stage in (0, 3))


def may_refuse(flow: Flow, text: str) -> bool:
    """Whether an error is one of those that docs/compatibility.md and SECURITY.md promise."""
    if "this error is unexpected" in text:
        return False
    if getattr(flow, "client", "") in UNSAFE and "trust_pickle" in text:
        return True
    is_class = "not on the list of safe globals" in text and "pytorch_optimizer" in text
    if is_class and isinstance(flow, EngineFlow) and flow.optimizer in PYTORCH_OPTIMIZERS:  # of the optimizer's own
        return True
    # neither is proven to be the live optimizer's: states of low rank without names; states of odd shapes beside
    # hyperparameters that only steps add
    without_names = flow.stage == 0 and "optimizer states without names" in text
    name = getattr(flow, "optimizer", "")
    is_known = name in _TORCH or _PACKAGED.get(name, "").startswith(("deepspeed", "tests", "transformers", "bits"))
    return without_names or (not is_known and '"mode": "off"' in text)
