# shellcheck shell=bash
# Sourced by the scripts beside it in the root of the repository: sets PYTHON to one that has everything installed.
# ELASTIC_CKPT_PYTHON names such a Python; without it, .venv is made once and reused. With EXTRAS=plots (the demo), it
# has these extras alone, and DeepSpeed.

if [[ -n "${ELASTIC_CKPT_PYTHON:-}" ]]; then
    PYTHON=$ELASTIC_CKPT_PYTHON
else
    PYTHON=$PWD/.venv/bin/python
    # Marks are written last, so an installation that was interrupted, or is older than what it installs, is done again.
    all=.venv/elastic_ckpt_installed
    some=$all${EXTRAS:+_$EXTRAS}
    is_current() { [[ -e $1 && ! setup.py -nt $1 && ! pyproject.toml -nt $1 ]]; }
    if ! is_current "$all" && ! is_current "$some"; then
        echo "installing torch, DeepSpeed and elastic_ckpt into .venv (takes minutes, once) ..."
        export PIP_DISABLE_PIP_VERSION_CHECK=1
        [[ -x $PYTHON ]] || python3 -m venv .venv
        # torch first and alone: setup.py of DeepSpeed looks at the torch that is there.
        "$PYTHON" -m pip install -q torch==2.13.0
        "$PYTHON" -m pip install -q deepspeed==0.19.8
        "$PYTHON" -m pip install -q -e ".[deepspeed,${EXTRAS:-test,plots,docs,package}]"
        touch "$some"
    fi
fi

# DeepSpeed compiles its CPU ops with the ninja that pip installed, which it looks for on PATH.
PATH=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
export PATH
