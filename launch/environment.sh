# shellcheck shell=bash
# Sourced by demo.sh and test.sh in the root of the repository: sets PYTHON to one that has everything installed.
# ELASTIC_CKPT_PYTHON names such a Python; without it, .venv is made once and reused.

if [[ -n "${ELASTIC_CKPT_PYTHON:-}" ]]; then
    PYTHON=$ELASTIC_CKPT_PYTHON
else
    PYTHON=$PWD/.venv/bin/python
    # The mark is written last, so an installation that was interrupted, or is older than setup.py, is done again.
    installed=.venv/elastic_ckpt_installed
    if [[ ! -e $installed || setup.py -nt $installed ]]; then
        echo "installing torch, DeepSpeed and elastic_ckpt into .venv (takes minutes, once) ..."
        [[ -x $PYTHON ]] || python3 -m venv .venv
        # torch first and alone: setup.py of DeepSpeed looks at the torch that is there.
        "$PYTHON" -m pip install -q torch==2.13.0
        "$PYTHON" -m pip install -q deepspeed==0.19.8
        "$PYTHON" -m pip install -q -e '.[test,plots]'
        touch "$installed"
    fi
fi

# DeepSpeed compiles its CPU ops with the ninja that pip installed, which it looks for on PATH.
PATH=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
export PATH
