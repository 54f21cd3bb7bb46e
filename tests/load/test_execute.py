"""How the loader leaves the process."""

from __future__ import annotations

import gc

import pytest

from elastic_ckpt.formats.pickled import collector_off


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collects: bool) -> None:
    was_enabled = gc.isenabled()

    @collector_off()
    def load() -> None:
        assert not gc.isenabled()
        raise KeyError

    try:
        (gc.enable if collects else gc.disable)()
        for _ in range(2):
            with pytest.raises(KeyError):
                load()
            assert gc.isenabled() == collects
    finally:
        (gc.enable if was_enabled else gc.disable)()
