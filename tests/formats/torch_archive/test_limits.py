"""What is beyond a limit: refused, and read of a file that is trusted wherever the error says so."""

from __future__ import annotations

import pickle

import pytest

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.archive import unpickled

START, NOTHING = b"\x80\x02", b"N."
#: Pickles of which a trusted reader makes something.
BEYOND = {
    "a long number": pickle.dumps(1 << (8 << 10), 2),
    "marks": START + b"(" * 1100 + b"t" * 1100 + b"0" + NOTHING,
    "names": START + b"".join(b"cmodule%d\nname\n0" % number for number in range((1 << 14) + 1)) + NOTHING,
    "parts of a key": pickle.dumps({tuple(range(1 << 12)): 1}, 2),
    "a long text in a key": pickle.dumps({("x" * (1 << 20), 1): 1}, 2),
}


@pytest.mark.parametrize("name", BEYOND)
def test_trust_is_a_way_out_where_it_lifts_the_limit(name: str) -> None:
    data = BEYOND[name]
    with pytest.raises(UnsupportedError, match="up to a limit") as caught:
        unpickled(data, len(data), trust_pickle=False)
    is_way = any(remedy.config == {"trust_pickle": True} for remedy in caught.value.remedies)
    try:
        unpickled(data, len(data), trust_pickle=True)
    except UnsupportedError:
        assert not is_way
    else:
        assert is_way
