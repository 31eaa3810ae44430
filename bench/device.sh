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
# compute-sanitizer, "memcheck racecheck" where not set; KINDS of kernels, all in `checks` below. It
# is what bench/pack_device.sh has packed, if it was asked to, else what the machine has.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-/tmp/voltapile-device}
site=/tmp/voltapile-site
models=/tmp/voltapile-models
sanitizer=/tmp/voltapile-sanitizer
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
  if [ -d device/sanitizer ] && [ ! -d "$sanitizer" ]; then
    $python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
      --target "$sanitizer" device/sanitizer/*.whl
  fi
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
    [ -f "$header" ] || continue
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

tests() { $python -m pytest -q -W default --maxfail="${MAXFAIL:-8}" --ptx="$models/ptx" -k "${SELECT:-}" "$@" -rfE --tb=short; }

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

# What compute-sanitizer sees: of each kind of kernel a test or two at sizes at which the checks of
# each access cost seconds. A program for each kind and tool, all at once, since a machine has cores
# and compiling is most of it. Left out: whole models, long contexts, statistics, and cuBLAS, which
# is not ours. `-k` does not know such names, so they are whole.
checks=(products attention experts deltas groups others)
checks_products=(  # 1 row is matmul_stream's, 8 of 12,288 columns matmul_wide's, 9 matmul_cluster's
  "test_matmul.py::test_rows[native-Q4_K-(48, 12288)]"
  "test_matmul.py::test_rows[native-Q6_K-(48, 12288)]"
  "test_matmul.py::test_rows[native-Q8_0-(37, 768)]"
  "test_matmul.py::test_glu[native-silu-144-('Q4_K', 'Q6_K')-rows]"
  "test_matmul.py::test_bias_and_residual[native-fused-64]"
  "test_matmul.py::test_pairs_of_formats[native-('Q4_K', 'Q6_K')-(70, 33)]"
  "test_norms.py::test_products_norm_with_the_same_bits[native-names0-768]")
checks_attention=(
  "test_attention.py::test_one_token[native-64-9-3-('f16','f16')]"
  "test_attention.py::test_one_token[native-128-32-8-('q8_0','q8_0')]"
  "test_attention.py::test_mixed_steps[native-64-9-3-('f16','q8_0')]"
  "test_attention.py::test_windows_caps_and_head_maps[native-{'window':64}-128]"
  "test_attention.py::test_rope_store_is_its_parts[native-True-neox-64-('q8_0','q4_0')]"
  "test_families.py::test_choice_of_scores[native-1-alike]"
  "test_families.py::test_choice_of_scores[native-140-plain]"
  "test_families.py::test_sparse_attention[native-q8_0-256]"
  "test_families.py::test_sparse_attention[native-f16-64]")
checks_experts=(  # expert_up_stream and _down_stream; 7 and 11 tokens: expert_parts
  "test_families.py::test_route[native-512-64-F16]"
  "test_families.py::test_experts[native-Q4_K-Q4_K-Q6_K-512-256]"
  "test_families.py::test_shared_expert[native-Q8_0-Q8_0-Q8_0-Q8_0-1280-256-32]"
  "test_families.py::test_tiles_of_any_size[native-Q4_K]"
  "test_families.py::test_experts_of_many_tokens[native-Q8_0-Q5_0-160-96]")
checks_deltas=(
  "test_families.py::test_delta_net[native-1-2-128-sigmoid]"
  "test_families.py::test_no_token_is_left_out[native-[40, 5]-True]"
  "test_families.py::test_chunks_go_on_from_drafts_that_stand[native-128]")
checks_groups=(  # kernels that wait for each other, which a tool may keep apart
  "test_group.py::test_sums[native-one island]"
  "test_group.py::test_sums_with_their_norms[native-one island]"
  "test_group.py::test_products_that_make_the_sum_of_their_parts[native-one island-6]")
checks_others=(
  "test_elementwise.py::test_rms_norm_of_heads[native]"
  "test_elementwise.py::test_embed_is_exact[native-Q4_0-33]"
  "test_elementwise.py::test_a_recorded_step_replays[native]"
  "test_sample.py::test_penalties_follow_random_md[native-37-0.8]"
  "test_sample.py::test_finish_codes[native]"
  "test_families.py::test_streams[native]"
  "test_families.py::test_every_byte_moves[native-3]")
# Copies that ring a bell (cp.async.bulk, mbarrier). NVIDIA's release notes: memcheck knows them from
# 2024.2 on and all their directions from 2025.2 on; racecheck those from global memory from 2024.4
# on, with false alarms (bells at several addresses of a warp, waits across clusters, complete-tx)
# that were mended in 2025.3, 2025.4, 2026.1 and 2026.3, and says nothing of those between blocks of
# a cluster. From 2026.4 on it also tells of a place that is read and then copied to without a proxy
# fence between (order_copies in csrc/bell.cuh); and it takes `@!UP SYNCS.EXCH` of a bell that some
# lanes make for a write of lanes that make none, so one thread makes bells where there are many.
# CUDA 13.0 has 2025.3. So before 2026.3 racecheck leaves these kernels out; what they wait for is
# watched by the emulation (tests/kernels/cuda/emulate_bell.h: what is there too early is rubbish).
# BELLS=1: have them checked all the same; not each report is then a fault.
bells="^(matmul_(stream|wide|cluster)|attention_decode|expert_(up_stream|down_stream|parts)|delta_pair|stream_up)$"

# sanitize TOOL KIND
sanitize() {
  if [[ " ${checks[*]} " != *" $2 "* ]]; then  # without a name pytest would run all there is
    summary+=("$1-$2: there is no such kind, but ${checks[*]}")
    return
  fi
  local -n tests=checks_$2
  local more=() version program=compute-sanitizer found
  for found in "$sanitizer"/nvidia/*/compute-sanitizer/compute-sanitizer; do
    [ -x "$found" ] && program=$found
  done
  if [ "$1" = racecheck ]; then
    version=$("$program" --version | grep -o '20[0-9][0-9]\.[0-9][0-9]*' | head -n 1)
    if [ -n "${BELLS:-}" ] || [[ $(printf '%s\n' 2026.3 "$version" | sort -V | head -n 1) = 2026.3 ]]; then
      more=(--num-cuda-barriers 128)  # they lie in arrays, which the compiler does not count
      # Who asks for a copy to a place that its warp has read fences when the warp has met; 2026.4
      # wants a fence of each reader before, and reports every such refill. FENCES=1: have it do so.
      [[ -z "${FENCES:-}" && $(printf '%s\n' 2026.4 "$version" | sort -V | head -n 1) = 2026.4 ]] &&
        more+=(--racecheck-fence-proxy-async no)
    else
      more=(--kernel-name-exclude "regex=$bells")
    fi
  fi
  LINES_SHOWN=6 CUDA_DEVICE_MAX_CONNECTIONS=32 stage "${SANITIZE_SECONDS:-190}" "$1-$2" \
    "$program" --tool "$1" "${more[@]}" --error-exitcode 9 --print-limit 20 \
    --port $((49152 + BASHPID % 1000 * 16)) \
    "$(command -v "$python")" -m pytest -q -W default --timeout 0 -p no:cacheprovider \
    ${SELECT:+-k "$SELECT"} "${tests[@]/#/tests/gpu/}"
}

run() {
  case $1 in
    setup) stage 120 setup bash -c "$(declare -f setup); python='$python' site='$site' models='$models' root='$root' sanitizer='$sanitizer'; setup" ;;
    build) stage 400 build bash -c "$(declare -f build); python='$python'; build" ;;
    compile) stage 300 compile $python -m voltapile.kernels.cuda --arch "$(arch)" ;;
    elementwise | sample | matmul | attention | model | families | serve | shared | file_table)
      stage 500 "$1" bash -c "$(declare -f tests); python='$python' models='$models'; tests tests/gpu/test_$1.py" ;;
    tests) together elementwise sample matmul attention model families serve shared file_table virtual ;;
    sanitize)
      local pairs=()
      for tool in ${TOOLS:-memcheck racecheck}; do
        for kind in ${KINDS:-${checks[*]}}; do pairs+=("$tool-$kind"); done
      done
      together "${pairs[@]}" ;;
    memcheck-* | racecheck-* | synccheck-* | initcheck-*) sanitize "${1%%-*}" "${1#*-}" ;;
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
