"""Live engines: adapters, and the engine's state besides its optimizer.

Only this package and :mod:`elastic_ckpt.patches` use private attributes of DeepSpeed;
:mod:`elastic_ckpt.engines.versions` lists them. This module imports nothing, so that versions can be checked first.
"""
