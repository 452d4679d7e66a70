#!/usr/bin/env bash
# Build a wheel and a source archive into dist, check them, and render a preview from each in a new environment.
#
#     deploy/dist.sh PYTHON
set -euo pipefail
python=$(realpath --no-symlinks "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf dist build/lib svdq.egg-info
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install -q --disable-pip-version-check build twine
"$work/tools/bin/python" -m build --outdir dist .
"$work/tools/bin/twine" check --strict dist/*

for archive in dist/*.whl dist/*.tar.gz; do
  echo "Installing $archive into a new environment; this takes a few minutes."
  "$python" -m venv "$work/env"
  "$work/env/bin/pip" install -q --disable-pip-version-check -c constraints.txt "$archive[worker]"
  # Outside of the checkout, so that nothing of it is imported.
  (
    cd "$work"
    export SVDQ_HOME="$work/home"
    "$work/env/bin/svdq" submit "$OLDPWD/docs/demo/photo.jpg" --frames 8 --steps 4
    "$work/env/bin/svdq" worker --burst
    "$work/env/bin/svdq" report
    "$work/env/bin/svdq" redis stop
    [ "$(find home/storage/outputs -name '*.mp4' | wc -l)" = 1 ]
  )
  rm -rf "$work/env" "$work/home"
done
