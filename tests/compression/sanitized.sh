#!/bin/sh
# Runs Python with kernels built under the address and undefined-behaviour sanitizers: sanitized.sh PYTHON ARGUMENTS..
# They are built into build/sanitized, beside a copy of the package, so that no installation is touched.
set -eu
cd "$(dirname "$0")/../.."
python=$1; shift
at=build/sanitized
san="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
rm -f "$at"/lib/thinwire/compression/native/kernels.*  # a build that fails leaves none of an earlier one
mkdir -p build
export THINWIRE_OPTIMIZED="${THINWIRE_OPTIMIZED:--O1}"
CXX=${CXX:-g++}; export CXX CC="$CXX"
if ! CFLAGS="$san" CXXFLAGS="$san" LDFLAGS="$san" "$python" setup.py -q build --build-base "$at" --build-lib "$at/lib" \
    --build-temp "$at/temp" >"$at.log" 2>&1 || ! ls "$at"/lib/thinwire/compression/native/kernels.* >/dev/null 2>&1; then
  cat "$at.log" >&2
  echo "error: the kernels could not be built under the sanitizers" >&2
  echo "try:   apt-get install g++ (libasan and libubsan come with it)" >&2
  exit 1
fi
# The interpreter itself is not built with them, so the runtime has to be there before it. Kernels allocate nothing,
# and CPython keeps what it has until the end: leaks are not looked for. Every allocation of Python's is one of its own,
# so that a read past a short `bytes` is seen too.
LD_PRELOAD="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libubsan.so)"
export LD_PRELOAD PYTHONMALLOC=malloc PYTHONPATH="$at/lib:." PYTHONSAFEPATH=1
# Its check of returned stacks stays off: gcc 12 does not align those for vectors (GCC bug 110027). Where each block was
# allocated is not kept, which takes a fifth of the time: a frame that harms does so again by its seed.
export ASAN_OPTIONS=detect_leaks=0:malloc_context_size=0:quarantine_size_mb=16:abort_on_error=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
exec "$python" "$@"
