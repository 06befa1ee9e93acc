#!/usr/bin/env bash
# Everything that a GPU can tell, in one command: builds, tests, measures, sums up.
#
#   bash benchmarks/gpu.sh OUT_DIR [--budget SECONDS] [--compare SECONDS] [--prebuilt] [--ncu] [--dry-run]
#
#   --budget S    seconds in all, 1500 without it; suites run in the order of their importance until they are over
#   --compare S   seconds that variants are compared with one another, 0.5 without it
#   --prebuilt    build nothing: load the stable-ABI libraries that lie in rbm_kernels/lib
#   --ncu         profile each kernel at the reference shape with Nsight Compute, after all suites
#   --dry-run     go as far as one can without a GPU: nothing is built, suites are only collected
#
# For a bare machine with PyTorch, Triton, nvcc, ninja, cmake and pybind11, and no network; PYTHON names its Python.
# OUT_DIR gets results.csv and log.txt, both as it goes, so that a run which is cut off leaves what it has; build.txt,
# tests.txt and, with --ncu, ncu.csv. The status is 1 where something failed: without correct kernels nothing is timed.
set -uo pipefail

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }
fail() { echo "gpu.sh: $*" >&2; exit 2; }

out='' budget=1500 compare=0.5 prebuilt=0 ncu=0 dry=0
while (($#)); do
  case $1 in
    --budget | --compare)
      [[ ${2-} =~ ^[0-9]+([.][0-9]+)?$ ]] || fail "$1 wants a number of seconds"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    --prebuilt | --ncu) printf -v "${1#--}" 1 ;;
    --dry-run) dry=1 ;;
    -h | --help) usage; exit 0 ;;
    -*) fail "unknown option $1" ;;
    *) [[ -z $out ]] || fail "one OUT_DIR, not $out and $1"; out=$1 ;;
  esac
  shift
done
[[ -n $out ]] || { usage >&2; exit 2; }
budget=${budget%.*}

mkdir -p "$out" || fail "cannot write $out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-python3}
results=$out/results.csv status=$out/status.txt
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset TRITON_INTERPRET # kernels run on the GPU or not at all
exec > >(tee -a "$out/log.txt") 2>&1
: >"$status"
((dry)) && echo "dry run: nothing is measured" >"$status"

left() { echo $((budget > SECONDS ? budget - SECONDS : 0)); }
note() { echo "$*" | tee -a "$status"; }
sum_up() {
  "$python" -m benchmarks.report.summary "$results" --status "$status"
  exit "$1"
}

echo "== machine, $(date -u +%FT%TZ), budget $budget s"
"$python" - <<'PYTHON' || fail "$python has no torch"
import platform, torch
try:
    from triton import __version__ as triton
except ImportError:
    triton = "missing"
print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton}")
PYTHON
for tool in nvcc ninja cmake nvidia-smi ncu; do echo "$tool: $(command -v $tool || echo missing)"; done
if ((!dry)); then
  nvidia-smi || true
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || fail "no GPU found; --dry-run needs none"
fi

echo "== build"
if ((prebuilt)); then
  [[ -f rbm_kernels/lib/librbm_cpu.so && -f rbm_kernels/lib/librbm_cuda.so ]] ||
    fail "--prebuilt: rbm_kernels/lib has no librbm_cpu.so and librbm_cuda.so"
  libraries='built elsewhere'
else
  libraries='built here'
  ((dry)) && libraries='would be built here'
  install=("$python" -m pip install --no-build-isolation --no-deps -e .)
  echo "+ RBM_BUILD_CUDA=1 ${install[*]}"
  if ((!dry)); then
    RBM_BUILD_CUDA=1 timeout -k 10 "$(left)" "${install[@]}" >"$out/build.txt" 2>&1 || {
      tail -30 "$out/build.txt"
      note "build: failed, see build.txt"
      sum_up 1
    }
  fi
fi
note "libraries: $libraries"
if ((!dry)); then
  "$python" - "$results" "$libraries" <<'PYTHON' || { note "libraries: not loaded"; sum_up 1; }
import sys
from pathlib import Path
import rbm_kernels
from benchmarks.measure.harness import Results
from rbm_kernels import _native
for name, entry in _native.status().items():
    assert entry["loaded"], entry["reason"]
    print(f"librbm_{name}: loaded from {entry['path']}")
Results(Path(sys.argv[1])).add("build", "librbm_cuda", sys.argv[2], "loaded", 1, device="cuda")
PYTHON
fi

echo "== correctness"
mapfile -t tests < <(grep -rlE 'mark\.gpu' tests --include='test_*.py' | sort)
((dry)) && collect=(--collect-only) || collect=()
timeout -k 10 "$(left)" "$python" -m pytest -q -m gpu "${tests[@]}" "${collect[@]}" >"$out/tests.txt" 2>&1
code=$?
tail -n $((dry ? 3 : 40)) "$out/tests.txt"
if ((code)); then
  note "correctness: FAILED (status $code), nothing is timed, see tests.txt"
  sum_up 1
fi
note "correctness: $(tail -1 "$out/tests.txt")"

# The reference shape first, operator by operator; then what else a user may ask; then the other shapes.
operators=(expert_matmul layer cosine_topk expert_order memory_update)
plan=()
for suite in "${operators[@]}"; do plan+=("test_$suite.py reference"); done
for suite in routed_matmul cold_start student sparse_expert_matmul distillation_epoch; do plan+=("test_$suite.py all"); done
for suite in "${operators[@]}"; do plan+=("test_$suite.py others"); done

echo "== suites"
failed=0
for step in "${plan[@]}"; do
  read -r suite shapes <<<"$step"
  if ((dry)); then
    [[ -f benchmarks/$suite ]] || fail "benchmarks/$suite is missing"
    echo "+ pytest benchmarks/$suite --shapes=$shapes --seconds=$compare --results=$results"
    continue
  fi
  if (($(left) < 20)); then
    note "not run, out of time: $suite ($shapes)"
    continue
  fi
  echo "-- $suite, shapes: $shapes, $(left) s left"
  timeout -k 10 "$(left)" "$python" -m pytest "benchmarks/$suite" -q --shapes="$shapes" --seconds="$compare" \
    --results="$results" --show-capture=no --tb=short
  code=$?
  case $code in
    0 | 5) ;; # 5: no workload of these shapes
    124 | 137) note "cut off: $suite ($shapes)" ;;
    *) failed=1; note "failed (status $code): $suite ($shapes)" ;;
  esac
done
if ((dry)); then
  "$python" -m pytest benchmarks -q --collect-only --seconds="$compare" --results="$results" | tail -3
  ((PIPESTATUS[0])) && { note "collecting the suites failed"; sum_up 1; }
fi

if ((ncu)); then
  echo "== profiles"
  # Clocks are left as they are; every kernel between the marks of the program is profiled once.
  profile=(ncu --clock-control none --profile-from-start off --csv --page details --print-details all)
  for section in SpeedOfLight MemoryWorkloadAnalysis ComputeWorkloadAnalysis Occupancy LaunchStats; do
    profile+=(--section "$section")
  done
  echo "+ ${profile[*]} $python -m benchmarks.compiled.profile_launches"
  if ((dry)); then
    "$python" -m benchmarks.compiled.profile_launches --dry-run
  elif ! command -v ncu >/dev/null; then
    note "profiles: ncu is missing"
  else
    timeout -k 10 $(($(left) > 120 ? $(left) : 120)) "${profile[@]}" "$python" -m benchmarks.compiled.profile_launches >"$out/ncu.csv" &&
      note "profiles: ncu.csv" || note "profiles: ncu failed, see the end of ncu.csv"
  fi
fi
sum_up "$failed"
