#!/usr/bin/env bash
# Prepare the ignored folder device/, which bench/device.sh needs on a machine with a GPU and no
# network: wheels, golden models, compute_70 PTX compiled here, headers of synthetic models; and, if
# a Python of DEVICE_PYTHON's version is here, the C++ module, which spares the stage `build` there.
#
#     bench/pack_device.sh [GOLDEN_FOLDER] [SYNTH_GGUF_PY]
#
# SANITIZER=1: also NVIDIA's newest compute-sanitizer, or SANITIZER=VERSION of its package, for the
# stage `sanitize`: 18 MB, and newer than what CUDA there has.
#
# Take it along with the project's files, then run bench/device.sh there.
set -euo pipefail
cd "$(dirname "$0")/.."
golden=${1:-../shared/golden}
synth=${2:-../shared/tools/synth_gguf.py}
python=${PYTHON:-.venv/bin/python}
there=${DEVICE_PYTHON:-3.12}
presets=(qwen3-8b-q4km qwen3-8b-q8 qwen3-30b-a3b-q4km qwen35-27b-q8 qwen35moe-35b-a3b-q4km
  flash-next-q4)
models=(llama-tied llama-untied qwen2 qwen3 gemma3)
families=(qwen3moe qwen3moe-k qwen35 qwen35-k qwen35moe qwen3next qwen4exp qwen4exp-k)
mkdir -p device/headers device/module

if [ ! -d device/wheels ]; then
  mkdir -p device/wheels.new
  platforms=()
  for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
  done
  $python -m pip download -q --no-deps --only-binary=:all: --python-version "$there" \
    --implementation cp "${platforms[@]}" -d device/wheels.new \
    gguf msgspec orjson py-libnuma pyzmq pytest-asyncio
  mv device/wheels.new device/wheels
fi

if [ -n "${SANITIZER:-}" ] && [ ! -d device/sanitizer ]; then
  mkdir -p device/sanitizer.new
  package=nvidia-cuda-sanitizer-api
  [ "$SANITIZER" = 1 ] || package+="==$SANITIZER"
  $python -m pip download -q --no-deps --only-binary=:all: --platform manylinux_2_25_x86_64 \
    --platform manylinux_2_17_x86_64 -d device/sanitizer.new "$package"
  mv device/sanitizer.new device/sanitizer
fi

if [ -d "$golden" ]; then
  tar -C "$golden" -czf device/golden.tar.gz "${models[@]}"
  tar -C "$golden" --exclude=model-f16.gguf --exclude=model-f32.gguf \
    -czf device/golden-families.tar.gz "${families[@]}"
fi

if there_python=$("python$there" -c 'import sys; print(sys.executable)' 2> /dev/null); then
  build=build/device-$there
  packages=$($python -c "import nanobind, pathlib; print(pathlib.Path(nanobind.__file__).parents[1])")
  mkdir -p "$build/site" && ln -sfn "$packages/nanobind" "$build/site/nanobind"
  export PYTHONPATH=$build/site
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$there_python" > /dev/null
  cmake --build "$build" > /dev/null
  unset PYTHONPATH
  cp "$build"/_cpu*.so device/module/
fi

rm -rf device/ptx
$python -m voltapile.kernels.cuda --ptx device/ptx -j 2 | tail -n 1
tar -C device -czf device/ptx.tar.gz ptx
rm -rf device/ptx

# A header, and how long its file would be.
for preset in "${presets[@]}"; do
  stem=device/headers/$preset
  [ -f "$stem.header.gz" ] && continue
  table=()
  [ "$preset" = flash-next-q4 ] && table=(--ngram-base 200000)  # all of it in one card's memory
  $python "$synth" "$preset" "$stem.gguf" --sparse "${table[@]}" > /dev/null
  $python - "$stem" <<'PYTHON'
import gzip, sys
from voltapile.shm.gguf import Gguf
stem = sys.argv[1]
with Gguf.open(f"{stem}.gguf") as gguf:
    begin = min(tensor.offset for tensor in gguf.tensors.values())
with open(f"{stem}.gguf", "rb") as file:
    header, length = file.read(begin), file.seek(0, 2)
with gzip.open(f"{stem}.header.gz", "wb") as file:
    file.write(header)
with open(f"{stem}.length", "w") as file:
    file.write(f"{length}\n")
PYTHON
  rm "$stem.gguf"
done
du -sh device/*
