#!/usr/bin/env bash
# Build, test and time everything on a machine with a GPU, in one call; a short table comes last.
# Needs no network: bench/pack_device.sh prepares the folder device/ beforehand.
#
#     bench/device.sh [STAGE ...]     stages: setup build compile tests (all of: elementwise sample matmul
#                                     attention model families serve shared file_table virtual, which
#                                     has six ranks on one GPU) sanitize gpu_matmul gpu_attention bench
#                                     streams startup http gateway; multi ranks group want two GPUs.
#                                     Default: what is in `all` below. setup always runs.
#
# A stage that fails is told and the next one runs. Whole logs are in $OUT, where that is set.
# SELECT is pytest's -k for the test stages, e.g. "native" to leave out the driver's compilation of
# the Volta source, which takes minutes; MAXFAIL after how many failures a stage stops. TOOLS: of
# compute-sanitizer, "memcheck racecheck" where not set; its tests are named in `sanitize` below.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-/tmp/voltapile-device}
site=/tmp/voltapile-site
models=/tmp/voltapile-models
log=$out/log.txt
mkdir -p "$out"
: > "$log"
export PYTHONPATH=$site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
python=${PYTHON:-python3}
random=${STARTUP:-qwen3-8b-q8}  # the model of which a whole file is written
timed=${MODELS:-qwen3-8b-q4km qwen3-8b-q8}
all=(build compile tests gpu_matmul gpu_attention bench streams startup http)
stages=("${@:-${all[@]}}")
summary=()

# stage SECONDS NAME COMMAND...: its last lines are shown, its result is kept for the table.
stage() {
  local limit=$1 name=$2 began=$SECONDS status
  shift 2
  echo "=== $name" | tee -a "$log"
  timeout -k 5 "$limit" "$@" > "$out/$name.txt" 2>&1
  status=$?
  tail -n "${LINES_SHOWN:-25}" "$out/$name.txt"
  cat "$out/$name.txt" >> "$log"
  summary+=("$(printf '%-14s rc %-3s %4d s  %s' "$name" "$status" $((SECONDS - began)) \
    "$(grep -v '^$' "$out/$name.txt" | tail -n 1 | cut -c 1-100)")")
  rm "$out/$name.txt"
}

setup() {
  set -e
  mkdir -p "$site/voltapile" "$models"
  for package in gateway kernels shm topology workers; do
    ln -sfn "$root/$package" "$site/voltapile/$package"
  done
  [ -d "$site/msgspec" ] || $python -m pip install -q --no-index --no-deps --no-compile \
    --no-cache-dir --target "$site" device/wheels/*.whl
  for module in device/module/_cpu*.so; do
    if [ -f "$module" ] && [ ! -f "kernels/cpu/$(basename "$module")" ]; then
      cp "$module" kernels/cpu/
    fi
  done
  if [ -f device/ptx.tar.gz ] && [ ! -d "$models/ptx" ]; then
    tar -C "$models" -xzf device/ptx.tar.gz
  fi
  for golden in device/golden*.tar.gz; do
    mkdir -p ../shared/golden
    [ -f "$golden" ] && tar -C ../shared/golden -xzf "$golden"
  done
  for header in device/headers/*.header.gz; do
    stem=$(basename "$header" .header.gz)
    [ -f "$models/$stem.gguf" ] && continue
    gunzip -c "$header" > "$models/$stem.gguf"
    truncate -s "$(cat "device/headers/$stem.length")" "$models/$stem.gguf"
  done
  nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version,clocks.sm --format=csv,noheader
  $python -c "
from voltapile.kernels.cuda import nvrtc
from voltapile.topology.gpu import probe_gpus
print('NVRTC', nvrtc.version(), nvrtc.include_folders())
print(probe_gpus())"
}

build() {
  set -e
  cmake -S . -B /tmp/voltapile-build -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$($python -c 'import sys; print(sys.executable)')"
  cmake --build /tmp/voltapile-build
  cp /tmp/voltapile-build/_cpu*.so kernels/cpu/
}

arch() { $python -c "from voltapile.topology.gpu import probe_gpus as p; print('sm_%d' % p()[0].arch)"; }

tests() { $python -m pytest -q -W default --maxfail="${MAXFAIL:-8}" --ptx "$models/ptx" -k "${SELECT:-}" "$@" -rfE --tb=short; }

bench() {
  for name in $timed; do
    model=$models/$name.gguf
    echo "$(basename "$model")"
    for shape in "-p 512 -n 64" "-p 2048 -n 64 -b 2048" "-p 8192 -n 64 -b 2048" \
      "-d 32768 -p 64 -n 64" "-d 131072 -p 64 -n 64" \
      "-d 32768 -p 64 -n 64 -ctk q8_0 -ctv q8_0"; do
      # shellcheck disable=SC2086
      $python -m voltapile.gateway.cli.main bench -m "$model" --backend cuda --dummy $shape \
        | tail -n 1
    done
  done
}

# One GPU, then two that share each matrix, then two that share the layers.
ranks() {
  model=$models/${RANKS_MODEL:-qwen3-8b-q8}.gguf
  for how in "-sm none" "--ranks 2 -sm tensor" ${LAYERS:+"--ranks 2 -sm layer"}; do
    for shape in "-p 512 -n 128" "-p 2048 -n 16 -b 2048"; do
      echo "$how $shape"
      # shellcheck disable=SC2086
      $python -m voltapile.gateway.cli.main bench -m "$model" --backend cuda --dummy $how $shape \
        2>> "$out/ranks-log.txt" | tail -n 1
    done
  done
}

streams() {
  for name in $timed; do
    model=$models/$name.gguf
    echo "$(basename "$model")"
    $python -m voltapile.gateway.cli.main bench -m "$model" --backend cuda --dummy \
      -p 128 -n 64 -npl "${STREAMS:-1,8,32}" -b 2048 2>> "$out/bench-log.txt"
  done
}

# The test stages side by side: the driver's compilation of the Volta source is what takes the time.
together() {
  local name began=$SECONDS
  for name in "$@"; do
    (summary=() && run "$name" > "$out/$name.part" && printf '%s\n' "${summary[@]}" > "$out/$name.row") &
  done
  wait
  for name in "$@"; do
    cat "$out/$name.part" 2> /dev/null
    [ -f "$out/$name.row" ] && summary+=("$(cat "$out/$name.row")")
    rm -f "$out/$name.part" "$out/$name.row"
  done
  summary+=("tests together: $((SECONDS - began)) s")
}

# Every kernel at sizes at which the checks of each access cost seconds: all formats in products of
# few and of many rows, columns that end inside a chunk, both kinds of attention for each width of
# head and cache type, stores, norms, rope, embedding, the sampler. Left out: whole models, long
# contexts, statistics, and cuBLAS, which is not ours.
small="native and not library and not 12288 and not 4096 and not 128-71 and (\
(test_rows and 37) or columns_that_end or pairs_of_formats or bias_and_residual or test_glu or \
(test_one_token and (16 or q4_0)) or (test_mixed_steps and 64-9-3) or test_windows_caps or \
captured_step or test_copy_page or past_the_page or rope_store or test_store or \
test_rope or test_embed or test_gather or test_rms_norm_of_heads or recorded_step or \
test_begin or test_finish_codes or test_not_finite or penalties or the_best_come)"

sanitize() {
  stage "${SANITIZE_SECONDS:-200}" "$1" compute-sanitizer --tool "$1" --error-exitcode 9 \
    --target-processes all --print-limit 20 "$(command -v "$python")" -m pytest -q -W default \
    --timeout 0 -p no:cacheprovider tests/gpu -k "$small ${SELECT:+and ($SELECT)}"
}

run() {
  case $1 in
    setup) stage 120 setup bash -c "$(declare -f setup); python='$python' site='$site' models='$models' root='$root'; setup" ;;
    build) stage 400 build bash -c "$(declare -f build); python='$python'; build" ;;
    compile) stage 300 compile $python -m voltapile.kernels.cuda --arch "$(arch)" ;;
    elementwise | sample | matmul | attention | model | families | serve | shared | file_table)
      stage 500 "$1" bash -c "$(declare -f tests); python='$python' models='$models'; tests tests/gpu/test_$1.py" ;;
    tests) together elementwise sample matmul attention model families serve shared file_table virtual ;;
    sanitize) for tool in ${TOOLS:-memcheck racecheck}; do sanitize "$tool"; done ;;
    gpu_matmul | gpu_attention) [ -f "bench/$1.py" ] && stage 200 "$1" $python "bench/$1.py" ;;
    virtual)  # kernels that wait for each other want a queue for each stream
      CUDA_DEVICE_MAX_CONNECTIONS=32 stage 200 virtual bash -c "$(declare -f tests); python='$python' models='$models'; tests tests/gpu/test_group.py" ;;
    group) LINES_SHOWN=80 stage 120 group bash -c "$python bench/group.py && $python bench/group.py --islands --only bits,times,replays --replays 2000" ;;
    multi)
      stage 300 multi bash -c "$(declare -f tests); python='$python' models='$models'; tests tests/gpu/test_ranks.py" ;;
    bench | streams | ranks)
      stage 400 "$1" bash -c "$(declare -f bench streams ranks); python='$python' models='$models' out='$out' timed='$timed'; $1" ;;
    startup) stage 200 startup $python bench/gpu_startup.py "$models/$random.gguf" --folder /tmp --upload ;;
    http)
      [ -f "/tmp/$random-random.gguf" ] || run startup
      stage 120 http $python bench/http_stream.py -m "/tmp/$random-random.gguf" -t 8 --rounds "${ROUNDS:-2}" ;;
    gateway)  # the processor alone
      stage 150 gateway $python bench/gateway_overhead.py -m "$root/../shared/golden/llama-tied/model-Q8_0.gguf" \
        --tokens 300 --repeat 2 ;;
    *) echo "there is no stage '$1'" ;;
  esac
}

run setup
for each in "${stages[@]}"; do
  [ "$each" = setup ] || run "$each"
done
echo "=== table: stage, exit status, seconds, last line"
printf '%s\n' "${summary[@]}"
