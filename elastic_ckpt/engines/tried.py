"""The releases of DeepSpeed that were tried. Written by ``launch/matrix.sh --releases``."""

#: Loads: columns of the table in docs/versions.md.
CELLS = (
    "ZeRO-1 to ZeRO-3, bf16",
    "ZeRO-3 to ZeRO-2",
    "mixture of experts",
    "PipelineModule",
    "universal, ZeRO-1 to 3",
)
_TRIED = """
0.14.5 0.15.0 0.15.1 0.15.2 0.15.3 0.15.4 0.16.0 0.16.1 0.16.2 0.16.3 0.16.4 0.16.5 0.16.6 0.16.7 0.16.8 0.16.9
0.17.0 0.17.1 0.17.2 0.17.3 0.17.4 0.17.5 0.17.6 0.18.0 0.18.1 0.18.2 0.18.3 0.18.4 0.18.5 0.18.6 0.18.7 0.18.8
0.18.9 0.19.0 0.19.1 0.19.2 0.19.3 0.19.4 0.19.5 0.19.6 0.19.7 0.19.8
"""
#: Release -> the loads that do not pass on it.
RELEASES: dict[str, tuple[str, ...]] = dict.fromkeys(_TRIED.split(), ())
