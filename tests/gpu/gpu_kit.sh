#!/bin/bash
# The first minutes with a GPU, in the root of a checkout (docs/how-to/gpu-first-run.md explains each step):
#   bash tests/gpu/gpu_kit.sh bring     on a machine with pip and a network: downloads wheels into .kit/wheels
#   bash tests/gpu/gpu_kit.sh first     environment, probes, tests, the benchmark at toy size            (545 s at most)
#   bash tests/gpu/gpu_kit.sh second    the benchmark with a mixture and a dense model, and a job        (570 s at most)
# Each step has a time limit and writes a file in $OUT (outputs/kit); a failed step does not stop the others.
# Without a GPU all steps run small on the CPU. PYTHON: the interpreter. KIT_PYTHON: Python version of the other machine.
set -u
OUT=${OUT:-outputs/kit}
PY=${PYTHON:-python3}
WHEELS=.kit/wheels
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/$WHEELS:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
TESTS="tests/runtime/test_gpu.py tests/runtime/test_gpu_roads.py tests/runtime/test_gpu_formats.py"
# These tests measure free memory, clocks or waits, so each runs alone on the GPU. All others run in parallel.
ALONE="copy or staging or pinned or told_of or trip or equals_plain or second_session or torch_keeps or full or waits"
ALONE="($ALONE or ask_nothing or touched or units) and not change_tokens"

bring() {
    local target=(--target "$WHEELS" --upgrade --no-deps --no-compile --quiet)
    local linux=(--only-binary=:all: --implementation cp --python-version "${KIT_PYTHON:-3.12}")
    for tag in manylinux_2_28 manylinux_2_17 manylinux2014; do linux+=(--platform "${tag}_x86_64"); done
    # greenlet is required besides torch, transformers, numba and pytest; jobs need the others
    $PY -m pip install "${target[@]}" "${linux[@]}" greenlet hydra-core omegaconf datasets dill multiprocess
    $PY -m pip install "${target[@]}" antlr4-python3-runtime==4.9.3 # no wheel: built here, pure Python
    echo "$WHEELS: $(du -sm "$WHEELS" | cut -f1) MiB; with it travel $(git ls-files -z | du -cm --files0-from=- | tail -1 | cut -f1) MiB of checkout"
}

step() { # step SECONDS FILE COMMAND...: sends INT at the limit; pytest and the benchmark then print their results
    local limit=$1 file=$OUT/$2 begin=$SECONDS rc
    shift 2
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$file" 2>&1
    rc=$?
    printf '%4d s  rc %-3d %3d s of %3d  %s\n' "$SECONDS" $rc $((SECONDS - begin)) "$limit" "$file" | tee -a "$OUT/steps.txt"
    tail -n "${TAIL:-4}" "$file" | cut -c1-220
}

has() { $PY -c 'import sys; from importlib.util import find_spec as f; sys.exit(not all(map(f, sys.argv[1:])))' "$@"; }

machine() {
    nvidia-smi
    nvidia-smi -q | grep -A11 "GPU Link Info"
    nvidia-smi --query-gpu=clocks.sm,clocks.max.sm,power.limit --format=csv
    lscpu | grep -E "Model name|^CPU\(s\)|MHz|Flags" | grep -oE "Model name.*|CPU.*|amx_bf16|avx512_bf16"
    free -g
    ulimit -l
    df -h . /tmp /dev/shm
    uname -r
    git log -1 --format='%h %ad' 2>/dev/null
    $PY -m pip list 2>/dev/null
    $PY -c "
import torch
print(torch.__version__, torch.version.cuda)
if not torch.cuda.is_available():
    print('torch sees no CUDA device')
else:
    p = torch.cuda.get_device_properties(0)
    print(p.name, (p.major, p.minor), p.total_memory >> 20, torch.cuda.mem_get_info())"
}

tests() { # tests SECONDS FILE EXPRESSION [OPTIONS]: -vv despite pyproject.toml's -q, to name each test as it ends
    local limit=$1 file=$2 chosen=$3 once=()
    shift 3
    has pytest_timeout && once=(--timeout=120)
    # the session times out before the step's limit: after INT, pytest prints no reports of failures
    $PY -m pytest --help 2>/dev/null | grep -q -- --session-timeout && once+=(--session-timeout=$((limit - 20)))
    step "$limit" "$file" $PY -m pytest $TESTS -vv -p no:cacheprovider "${once[@]}" $MARK -k "$chosen" "$@"
}

first() {
    TAIL=3 step 60 env.txt bash "$0" machine
    TAIL=40 step 120 probe.txt $PY -m tests.gpu.probe
    local beside=()
    has xdist && beside=(-n $(($(nproc) < 6 ? $(nproc) : 6)) --dist worksteal)
    # two processes: after a corrupted CUDA context, all later tests of a process fail
    TAIL=12 tests 90 laws.txt "$ALONE"
    TAIL=25 tests 200 tokens.txt "not ($ALONE)" "${beside[@]}"
    TAIL=40 step 75 toy.txt $PY -m benchmarks.gpu toy $CPU gpu.minutes=1
}

second() {
    local mixture="gpu.num_layers=8 gpu.minutes=5" dense="gpu.model=llama gpu.num_layers=10 gpu.minutes=2"
    if [ -n "$CPU" ]; then mixture="toy gpu.minutes=3" dense="toy gpu.model=llama gpu.minutes=1.5"; fi
    TAIL=60 step 360 mixture.txt $PY -m benchmarks.gpu $mixture $CPU
    cp -f outputs/gpu/rounds.json "$OUT/mixture.json" 2>/dev/null
    TAIL=60 step 150 dense.txt $PY -m benchmarks.gpu $dense $CPU
    cp -f outputs/gpu/rounds.json "$OUT/dense.json" 2>/dev/null
    if has hydra omegaconf datasets pyarrow; then
        TAIL=12 step 60 job.txt $PY -m jobs.generate machine=$([ -n "$CPU" ] && echo cpu || echo cuda) offload=nvme
    fi
}

case "${1:-}" in
    bring) bring; exit ;;
    machine) machine; exit ;;
    first | second) mkdir -p "$OUT" ;;
    *) echo "usage: gpu_kit.sh bring | first | second"; exit 2 ;;
esac
CPU="" MARK="-m gpu"
if ! $PY -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "no CUDA device: runs on the CPU, only to test the steps"
    CPU="gpu.device=cpu" MARK=""
fi
"$1"
echo "== $SECONDS s"
cat "$OUT/steps.txt"
