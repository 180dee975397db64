#!/bin/sh
# Installs Weightstream into an image of Debian or Ubuntu, from the source in the working directory: for Dockerfile and
# apptainer.def. Environment: TORCH=cpu|cuda, the build of torch; EXTRAS, extras of pyproject.toml; PREFIX, the virtual
# environment to create.
set -eu
prefix=${PREFIX:-/opt/weightstream}
case ${TORCH:-cpu} in
cpu) index=https://download.pytorch.org/whl/cpu ;;
cuda) index= ;; # the build of the default index
*) echo "TORCH must be cpu or cuda, got $TORCH" >&2 && exit 2 ;;
esac

# Triton compiles its launchers on a GPU with gcc and the headers of Python.
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    ca-certificates python3 python3-dev python3-venv gcc libc6-dev
rm -rf /var/lib/apt/lists/*

python3 -m venv "$prefix"
"$prefix/bin/python" -m pip install --no-cache-dir --disable-pip-version-check -c constraints.txt \
    ${index:+--extra-index-url "$index"} ".[${EXTRAS:-gguf}]"
"$prefix/bin/weightstream" --version
