"""The releases of DeepSpeed that were tried. Written by ``launch/matrix.sh --releases``."""

#: Loads: columns of the table in docs/versions.md.
CELLS = ("ZeRO-1 to ZeRO-3, bf16",)
#: Release -> the loads that do not pass on it.
RELEASES: dict[str, tuple[str, ...]] = {
    "0.19.8": (),
}
