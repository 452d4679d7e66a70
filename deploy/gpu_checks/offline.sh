#!/usr/bin/env bash
# Bring `deploy/gpu_check.py` to a machine with a GPU, torch and transformers, Python 3.12, and no network.
#
#     deploy/gpu_checks/offline.sh pack PYTHON     # here: two archives in gpu-check, of 50 MiB each
#     deploy/gpu_checks/offline.sh unpack PYTHON   # there, in a copy of the checkout with these archives
#     PYTHON deploy/gpu_check.py --total-s 570
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$2
mkdir -p gpu-check

case $1 in
pack)
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work" .
  "$python" -m pip install -q --disable-pip-version-check --no-compile --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --target "$work/site" \
    -r deploy/gpu_checks/wheels.txt "$work"/svdq-*.whl
  rm -f "$work"/site/comfy_kitchen/backends/hip/_C* # for AMD
  cd "$work/site"
  tar cf - --exclude='./av*' --exclude='./imageio_ffmpeg*' . | xz -T0 -3 > "$OLDPWD/gpu-check/site.tar.xz"
  tar cf - av* imageio_ffmpeg* | xz -T0 -3 > "$OLDPWD/gpu-check/site-media.tar.xz"
  ;;
unpack)
  mkdir -p gpu-check/site
  for archive in gpu-check/site*.tar.xz; do tar xf "$archive" -C gpu-check/site; done
  # Before the packages that the machine has, which may be older.
  "$python" -c 'import pathlib, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "svdq-gpu-check.pth").write_text(
    f"import sys; sys.path.insert(0, {str(pathlib.Path("gpu-check/site").absolute())!r})\n")'
  ;;
esac
