#!/usr/bin/env bash
# Tests --engine mmdet3d and bevctl.integrations.mmdet3d with the real packages.
# Usage: tests/mmdet3d/run.sh [VENV] [pytest arguments]; the environment is made if it is not there (about 15 minutes on
# two cores, 4 GB), by the commands of docs/mmdet3d.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv/mmdet3d}
shift || true
if [ ! -x "$venv/bin/python" ]; then
    python3.11 -m venv "$venv"
    "$venv/bin/pip" install torch==2.13.0 'numpy<2' 'setuptools<81' wheel ninja psutil
    CFLAGS=-g0 MMCV_WITH_OPS=1 FORCE_CUDA=0 MAX_JOBS=${MAX_JOBS:-2} \
        "$venv/bin/pip" install --no-deps --no-build-isolation --no-binary mmcv mmcv==2.1.0
    "$venv/bin/pip" install -e '.[mmdet3d]' pytest hypothesis
    "$venv/bin/python" -c 'import torch, mmcv._ext'
fi
# Plugins that come with these packages are not made for warnings that count as errors.
BEVCTL_TEST_MMDET3D=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 exec "$venv/bin/python" -m pytest -p no:cacheprovider tests/mmdet3d "$@"
