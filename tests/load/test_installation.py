"""What install() does before it touches DeepSpeed."""

from __future__ import annotations

import subprocess
import sys


def test_versions_are_checked_before_deepspeed_is_imported() -> None:
    script = (
        "import sys, elastic_ckpt\n"
        "from elastic_ckpt.engines import versions\n"
        "versions.REQUIREMENTS = (versions.Requirement('DeepSpeed', '99', '99'),)\n"
        "try: elastic_ckpt.install()\n"
        "except elastic_ckpt.ElasticCkptError as error: assert 'too old' in str(error)\n"
        "else: sys.exit('was installed')\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
