# Trains by the plans beside it on one GPU. Usage: FBGEMM=ARCHIVE bash run.sh OUT [options of gpu_train.py]
# FBGEMM: a tar archive of fbgemm-gpu, unless it is installed.
set -u
here="$(cd "$(dirname "$0")" && pwd)"; out="$1"; shift
site="$(mktemp -d)"; mkdir -p "$out"
for archive in "$here/site.tar.xz" ${FBGEMM:-}; do tar xf "$archive" -C "$site" & done
nvidia-smi 2>/dev/null; wait
export PYTHONPATH="$site" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 RAY_worker_niceness=0
timeout -k 5 390 python3 "$here/gpu_train.py" --plans "$here/plans" --out "$out" --seconds $((375 - SECONDS)) "$@" \
    2>&1 | tee "$out/train.log"
rm -rf "$site"
