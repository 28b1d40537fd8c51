#!/usr/bin/env bash
# make_system.sh FOLDER: makes a Debian for arm64 in FOLDER/root, with all that edge-run and its tests need, to run under
# qemu-user. What was made before is kept. CONTRIBUTING.md says what it needs.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1" && cd "$1"
folder=$PWD environment=$PWD/root/opt/edge-run
: "${ARM64_ARCH:=armv8.2-a+fp16+dotprod+i8mm}" # instructions that llama.cpp is built with
: "${DEBIAN:=}" # the mirror; without one it is the one that debootstrap knows

for tool in debootstrap qemu-aarch64-static aarch64-linux-gnu-g++ cmake ninja unshare; do
    command -v $tool >/dev/null || { echo "$tool is missing: CONTRIBUTING.md names what is needed" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "making a system and mounting needs root" >&2; exit 1; }

formats=/proc/sys/fs/binfmt_misc # which program runs which kind of file
[ -e $formats/register ] || mount -t binfmt_misc binfmt_misc $formats
[ -e $formats/qemu-aarch64 ] || cat /usr/lib/binfmt.d/qemu-aarch64.conf >$formats/register

# Packages are unpacked here and not set up there, which would take half an hour under emulation.
if [ ! -e "$environment" ]; then
    wanted=python3,python3-venv,libgomp1,libstdc++6,procps,mosquitto,git,make,gcc,libc6-dev,iproute2,util-linux
    debootstrap --arch=arm64 --variant=minbase --include=$wanted --download-only bookworm packages ${DEBIAN:+"$DEBIAN"}
    rm -rf root.new && mkdir -p root.new/usr/{bin,sbin,lib}
    for name in bin sbin lib; do ln -s usr/$name root.new/$name; done
    for package in packages/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C root.new
    done
    for name in passwd group; do cp root.new/usr/share/base-passwd/$name.master root.new/etc/$name; done
    ln -s gcc root.new/usr/bin/cc
    chroot root.new sh -c 'ldconfig && python3 -m venv --without-pip /opt/edge-run'
    mv root.new root
fi

# pip, too, can unpack what is for another machine.
[ -e host/bin/pip ] || python3 -m venv host
host/bin/pip install --quiet scikit-build-core tomli
version=$(chroot root python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
packages=$environment/lib/python$version/site-packages
install=(host/bin/pip install --quiet --target "$packages" --python-version "$version" --only-binary :all: --no-compile
    --platform linux_aarch64 --platform manylinux2014_aarch64)
for minor in $(seq 18 36); do install+=(--platform "manylinux_2_${minor}_aarch64"); done

if [ ! -e requirements.txt ] || ! host/bin/python "$repository/tests/arm64/requirements.py" | cmp -s - requirements.txt; then
    host/bin/python "$repository/tests/arm64/requirements.py" >wanted.txt
    "${install[@]}" --upgrade --requirement wanted.txt
    mv wanted.txt requirements.txt
fi

if [ ! -e "$packages/llama_cpp/lib/libllama.so" ]; then
    if ! ls -d llama_cpp_python-*/ >/dev/null 2>&1; then
        host/bin/pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
            "$(host/bin/python "$repository/tests/arm64/requirements.py" llama-cpp-python)"
        tar -xzf llama_cpp_python-*.tar.gz
    fi
    source=$(ls -d llama_cpp_python-*/)
    cmake -S "$source/vendor/llama.cpp" -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
        -DCMAKE_INSTALL_RPATH='$ORIGIN' -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON \
        -DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH="$ARM64_ARCH" -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
    cmake --build build --target llama
    cp -r "$source/llama_cpp" "$packages"
    mkdir -p "$packages/llama_cpp/lib" "$packages/$(basename "$source").dist-info"
    cp "$source/PKG-INFO" "$packages/$(basename "$source").dist-info/METADATA"
    cp -P build/bin/lib*.so* "$packages/llama_cpp/lib" # last: it says that all is there
fi

cp "$repository/tests/arm64/sitecustomize.py" "$packages"
"$repository/tests/arm64/enter.sh" "$folder" python -m pip install --quiet --no-index --no-deps --no-build-isolation \
    --editable /edge-run
