#!/bin/sh
# Reports what GPUDirect Storage needs on this machine, and on Debian and Ubuntu installs it.
#
#   sh scripts/install_gds.sh --check [--json] [PATH]   report only: changes nothing, needs no root
#   sh scripts/install_gds.sh --dry-run [PATH]          print the commands that would be run
#   sh scripts/install_gds.sh [--add-repo=DEB] [PATH]   install nvidia-fs, as root
#
# PATH is the directory of the models: its file system is checked too. NVIDIA's apt repository is used
# if it is configured, and only added if --add-repo names the package that adds it: the cuda-keyring
# file of NVIDIA's CUDA installation guide. Settings of the kernel and the driver are reported and not
# changed, and no package is ever removed. See docs/gds-setup.md.
#
# Exit codes: 0  a native mode is ready (nvidia-fs, or PCI P2PDMA without it)
#             1  this script can install the missing parts
#             2  this script cannot make it work here; the reasons are printed
#             3  wrong arguments, no root, or a command failed
#
# For its tests: GDSLOAD_SYSROOT is a directory that replaces / in all checks.
set -eu
export LC_ALL=C
PATH=$PATH:/usr/sbin:/sbin # modinfo, for users whose PATH has neither

root=${GDSLOAD_SYSROOT:-} action=install json='' add_repo='' path=''

say() { printf 'install_gds: %s\n' "$*"; }
die() {
    say "$@" >&2
    exit 3
}
text() { cat "$root$1" 2>/dev/null || true; }
holds() { grep -Eiqs "$2" "$root$1"; } # file pattern

while [ $# -gt 0 ]; do
    case $1 in
    --check) action=check ;;
    --dry-run) action=dry ;;
    --json) json=yes ;;
    --add-repo=?*) add_repo=${1#*=} ;;
    --help | -h) exec sed -n '2,/^set -eu/{/^set/d;s/^# \{0,1\}//;p;}' "$0" ;;
    -*) die "there is no option $1; see --help" ;;
    *) path=$1 ;;
    esac
    shift
done
[ -z "$json" ] || [ "$action" = check ] || die "--json goes with --check"
if [ -n "$path" ]; then
    [ -e "$root$path" ] || die "$path: there is no such path"
    path=$(readlink -f "$root$path")
    [ -z "$root" ] || path=${path#"$(readlink -f "$root")"}
fi

# One record per line: verdict, name, the modes that it rules out, detail, hint. Modes: "-", "both",
# "nvidia-fs", "p2pdma"; or "install" (nvidia-fs, until this script has installed it).
sep=$(printf '\037')
found=
add() {
    found="$found$1$sep$2$sep$3$sep$4$sep${5:-}
"
}
ruled_out() { # pattern   the names of the findings that rule it out
    printf '%s' "$found" | awk -F "$sep" -v p="^($1)\$" '$3 ~ p { a = a (a ? ", " : "") $2 }
        END { print a }'
}
at_least() { # have want
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

look_at_system() {
    arch=$(uname -m) kernel=$(uname -r)
    pretty=$(text /etc/os-release | sed -n 's/^PRETTY_NAME=//p' | tr -d '"')
    can_install='' container=''
    if holds /etc/os-release '^ID(_LIKE)?=.*(debian|ubuntu)'; then
        can_install=yes
        add yes distribution - "$pretty"
    else
        add partly distribution - "${pretty:-unknown}: this script installs on Debian and Ubuntu" \
            "NVIDIA's GPUDirect Storage installation guide has yours"
    fi
    if [ -n "${KUBERNETES_SERVICE_HOST:-}" ] || [ -e "$root/.dockerenv" ] ||
        [ -e "$root/run/.containerenv" ] || [ -e "$root/run/systemd/container" ] ||
        holds /proc/1/cgroup 'docker|containerd|kubepods|libpod|/lxc'; then
        container=yes
        can_install=
        add partly host - "a container: its host must have the driver and the modules"
    fi
    if ! holds /proc/kallsyms p2pdma_pgmap_ops &&
        ! holds "/boot/config-$kernel" '^CONFIG_PCI_P2PDMA=y' &&
        ! gzip -cd "$root/proc/config.gz" 2>/dev/null | grep -q '^CONFIG_PCI_P2PDMA=y'; then
        add no kernel p2pdma "$kernel: PCI P2PDMA is not to be seen" \
            "a kernel of 6.2 or newer with CONFIG_PCI_P2PDMA"
    elif at_least "$kernel" 6.2; then add yes kernel - "$kernel, with PCI P2PDMA"; else
        add partly kernel - "$kernel, with PCI P2PDMA: NVIDIA asks for 6.2 or newer"
    fi
    if [ -r "$root/proc/modules" ]; then add yes /proc/modules - readable; else
        add no /proc/modules both "cannot be read: opening cuFile's driver would spin for ever" \
            "a kernel with modules, or a sandbox that shows /proc/modules"
    fi
    if [ -d "$root/run/udev" ]; then add yes udev - "/run/udev is there"; else
        add no udev both "no /run/udev: cuFile cannot tell the drives (5027, 5030)" \
            "start systemd-udevd; for a container, -v /run/udev:/run/udev:ro"
    fi
}

look_at_gpu() {
    pci=''
    gpus=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null) || gpus=
    # Where nvidia-smi is not there, or cannot reach the driver:
    [ -n "$gpus" ] || gpus=$(cat "$root"/proc/driver/nvidia/gpus/*/information 2>/dev/null |
        sed -n 's/^Model:[[:space:]]*//p')
    for device in "$root"/sys/bus/pci/devices/*; do
        [ "$(cat "$device/vendor" 2>/dev/null)" = 0x10de ] || continue
        case $(cat "$device/class" 2>/dev/null) in 0x03*) pci="$pci ${device##*/}" ;; esac
    done
    capability=$(printf '%s\n' "$gpus" | sed -n 's/.*, *//p' | sort -V | tail -n 1)
    case $capability in
    6.*) generation=Pascal ;; 7.0 | 7.2) generation=Volta ;; 7.5) generation=Turing ;;
    8.9) generation="Ada Lovelace" ;; 8.*) generation=Ampere ;; 9.*) generation=Hopper ;;
    1[0-2].*) generation=Blackwell ;; *) generation="of unknown generation" ;;
    esac
    gpu=$(printf '%s\n' "$gpus" | awk -F, 'NR == 1 { a = $1 } END { print NR ": " a }')
    gpu="$gpu, $generation"
    if [ -z "$gpus$pci" ]; then
        add no GPU both "no NVIDIA GPU is to be seen"
    elif [ -z "$gpus" ]; then
        add partly GPU - "at$pci, which no driver speaks for"
    elif [ -n "$capability" ] && ! at_least "$capability" 8; then
        add partly GPU p2pdma "$gpu: PCI P2PDMA wants Ampere or newer"
    else
        listed='A100|A40|L4|L40S|H100|H200|B100|B200|B300'
        if printf '%s\n' "$gpus" | grep -Eq "(^|[ -]|G)($listed)([ ,-]|\$)"; then
            add yes GPU - "$gpu"
        else
            add partly GPU - "$gpu: not on NVIDIA's list for PCI P2PDMA"
        fi
    fi
    [ "$arch" = x86_64 ] || add partly platform - "$arch: NVIDIA describes PCI P2PDMA for x86_64"
}

look_at_driver() {
    open=
    version=$(text /proc/driver/nvidia/version | head -n 1)
    driver=$(printf '%s\n' "$version" | awk '{
        for (i = 1; i <= NF; i++) if ($i ~ /^[0-9]+\.[0-9.]+$/) { print $i; exit } }')
    case $version in *"Open Kernel Module"*) open=yes ;; esac
    if [ -z "$driver" ]; then
        held=$(modinfo -F version nvidia 2>/dev/null) || held=
        add no driver both "NVIDIA's driver is not loaded${held:+ ($held is installed)}" \
            "${held:+modprobe nvidia; or }install NVIDIA's driver with its open kernel modules"
    elif [ -z "$open" ]; then
        add partly driver p2pdma "$driver, proprietary: PCI P2PDMA and new nvidia-fs want open" \
            "NVIDIA's open kernel modules (Turing or newer)"
    elif ! at_least "$driver" 565.47; then
        add partly driver p2pdma "$driver, open: PCI P2PDMA wants 565.47 or newer" "a newer driver"
    else
        add yes driver - "$driver, open"
    fi
    speaks=$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA( UMD)? Version: *([0-9.]*).*/\2/p' |
        head -n 1)
    toolkit=$(text /usr/local/cuda/version.json | tr -d '\n' |
        sed -n 's/.*"cuda"[^}]*"version" *: *"\([0-9.]*\)".*/\1/p')
    cuda=$(printf '%s\n%s\n' "$speaks" "$toolkit" | sort -V | tail -n 1)
    seen="of the driver ${speaks:-unknown}, of the toolkit ${toolkit:-none}"
    if [ -z "$cuda" ]; then
        add partly CUDA - "$seen: PCI P2PDMA wants 12.8 or newer"
    elif at_least "$cuda" 12.8; then
        add yes CUDA - "$seen"
    else
        add partly CUDA p2pdma "$seen: PCI P2PDMA wants 12.8 or newer" "a driver of 570 or newer"
    fi
}

candidate() { # package   whether apt offers it
    apt-cache policy "$1" 2>/dev/null | grep -E '^ *Candidate:' | grep -vq '(none)'
}
built() { modinfo nvidia_fs >/dev/null 2>&1; }
repository() { # known by its path, not by its host: mirrors keep the path
    grep -Erqs --include='*.list' --include='*.sources' \
        '^[^#]*(compute/cuda/repos|/var/cuda-repo-)' \
        "$root/etc/apt/sources.list" "$root/etc/apt/sources.list.d"
}
look_at_nvidia_fs() {
    version=$(text /proc/driver/nvidia-fs/version | tr '\n' ' ' | sed 's/[[:space:]]*$//')
    set -- "$root"/dev/nvidia-fs*
    if [ -n "$version" ] || holds /proc/modules '^nvidia_fs '; then
        if [ -e "$1" ]; then
            add yes nvidia-fs - "loaded${version:+, $version}"
        else
            add no nvidia-fs nvidia-fs "loaded, but there is no /dev/nvidia-fs*" \
                "give the container --device=/dev/nvidia-fs0 and its siblings"
        fi
    elif [ -n "$container" ]; then
        add no nvidia-fs nvidia-fs "not loaded" "install it on the host, not here"
    elif [ -n "$can_install" ] && [ -n "$driver" ] && built; then
        add no nvidia-fs install "built, but not loaded" "modprobe nvidia-fs"
    elif [ -n "$can_install" ] && [ -n "$open" ]; then
        add no nvidia-fs install "not installed" "sh scripts/install_gds.sh"
        repository || add partly "apt repository" - "NVIDIA's is not configured" \
            "--add-repo=PACKAGE, the cuda-keyring of NVIDIA's CUDA installation guide"
        [ -e "$root/lib/modules/$kernel/build" ] || candidate "linux-headers-$kernel" ||
            add partly "kernel headers" - "none for $kernel, nor in apt" "its builder has them"
    else
        add no nvidia-fs nvidia-fs "not loaded" "the open driver, then nvidia-fs, by NVIDIA's guide"
    fi
    mofed=$(ofed_info -s 2>/dev/null | tr -d ':') || mofed=
    # nvidia-fs takes hold of the NVMe driver by this symbol; stock kernels do not have it.
    if holds /proc/driver/nvidia-fs/modules '^nvme' ||
        holds /proc/kallsyms '[[:space:]]nvme_v[0-9]+_register_nvfs_dma_ops'; then
        add yes "NVMe patch" - "the NVMe driver knows nvidia-fs; ${mofed:-no MOFED}"
    else
        if [ "$drive" = nvme ]; then blocks=nvidia-fs; else blocks=-; fi
        add partly "NVMe patch" "$blocks" "${mofed:-no MOFED}; the NVMe driver knows no nvidia-fs" \
            "MOFED or DOCA with its NVMe modules, or PCI P2PDMA"
    fi
}

look_at_p2pdma() {
    conf='options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
    if [ "$arch" != x86_64 ]; then
        add yes "static BAR1" - "not needed on $arch"
    elif holds /proc/driver/nvidia/params '^RegistryDwords:.*RMForceStaticBar1=1' &&
        holds /proc/driver/nvidia/params '^RegistryDwords:.*RmForceDisableIomapWC=1'; then
        add yes "static BAR1" - "the driver runs with it"
    elif grep -Erqsi '^[^#]*RMForceStaticBar1=1' "$root/etc/modprobe.d"; then
        add no "static BAR1" p2pdma "set, but the driver does not run with it" \
            "update-initramfs -u, then reboot"
    else
        add no "static BAR1" p2pdma "the driver runs without it" \
            "in /etc/modprobe.d/nvidia-p2pdma.conf: $conf"
    fi
    case $(text /sys/module/nvme_core/parameters/multipath) in
    Y*) add no "NVMe multipath" p2pdma on \
        "/etc/modprobe.d/nvme.conf: options nvme_core multipath=N; update-initramfs -u; reboot" ;;
    *) add yes "NVMe multipath" - off ;;
    esac
    set -- "$root"/sys/class/iommu/*
    if [ ! -e "$1" ] && [ ! -L "$1" ]; then
        add yes IOMMU - off
    elif holds /proc/cmdline '(^| )iommu=pt( |$)'; then
        add partly IOMMU - "on, passing through: NVIDIA supports that on some platforms"
    else
        add partly IOMMU - "on: NVIDIA does not promise that it works, or is fast" \
            "on the kernel's command line: iommu=off, amd_iommu=off or intel_iommu=off"
    fi
}

number() { # name default   a number of cufile.json
    value=$(printf '%s\n' "$lines" |
        sed -n 's/.*"'"$1"'"[[:space:]]*:[[:space:]]*\([0-9]\{1,12\}\).*/\1/p')
    echo "${value:-$2}"
}
look_at_settings() {
    file=${CUFILE_ENV_PATH_JSON:-/etc/cufile.json}
    # Its comments say nothing; a // with an odd number of quotes before it is in a string.
    lines=$(text "$file" | sed -e ':a' -e 's|^\(\([^"]*"[^"]*"\)*[^"]*\)//.*|\1|' -e ta |
        tr '\n' ' ' | sed 's|/\*[^*]*\*/||g')
    asks="in /etc/cufile.json: {\"properties\": {\"use_pci_p2pdma\": true},\
 \"block\": {\"nvme\": {\"use_pci_p2pdma\": true}}}"
    if printf '%s' "$lines" | grep -Eq '"use_pci_p2pdma"[[:space:]]*:[[:space:]]*true' ||
        [ "${CUFILE_USE_PCIP2PDMA:-}" = true ]; then
        add yes use_pci_p2pdma - "asked for"
    elif printf '%s' "$lines" | grep -q '"use_pci_p2pdma"' ||
        [ -n "${CUFILE_USE_PCIP2PDMA+set}" ]; then
        add no use_pci_p2pdma p2pdma "switched off" "$asks"
    elif [ -n "$toolkit" ] && ! at_least "$toolkit" 12.9; then
        add no use_pci_p2pdma p2pdma \
            "not asked for: gdsload does it itself with libcufile 1.14, of CUDA 12.9" "$asks"
    else
        add partly use_pci_p2pdma - \
            "not asked for: gdsload does it itself, with libcufile 1.14 or newer" \
            "for other programs, $asks"
    fi
    cache=$(number max_device_cache_size_kb 131072)
    each=$(number per_buffer_cache_size_kb 1024) batch=$(number io_batchsize 128)
    if [ -z "$lines" ]; then
        add yes cufile.json - "none: cuFile's defaults"
    elif [ "$cache" -ge $((each * batch)) ]; then add yes cufile.json - "$file"; else
        add partly cufile.json - "$file: a batch of $batch needs more than its $cache KB of cache" \
            "max_device_cache_size_kb of at least $((each * batch))"
    fi
}

find_mount() { # sets fs, source, options and drive: the mount that PATH is on
    mount=$(text /proc/self/mountinfo | awk -v path="$path" '{
        at = $5
        gsub(/\\040/, " ", at)
        inside = at == "/" || path == at || index(path, at "/") == 1
        if (!inside || length(at) < best) next
        best = length(at)
        for (i = 7; $i != "-"; i++);
        line = $3 " " $(i + 1) " " $(i + 2) " " $6 "," $(i + 3)
    } END { print line }')
    read -r device fs source options <<END
$mount
END
    case "$(readlink "$root/sys/dev/block/$device" || echo "/$source")" in
    */nvme-fabrics/*) drive=nvme-of ;;
    */nvme*) drive=nvme ;;
    */md[0-9]* | */md/*) drive=raid ;;
    */dm-* | */mapper/*) drive=mapper ;;
    *) drive=other ;;
    esac
}
look_at_path() {
    on="${fs:-unknown} from ${source:-nowhere}"
    kind=$fs
    case $fs,$options in
    ext4,*data=journal* | ext4,*data=writeback*) kind=unordered ;;
    ext4,* | xfs,*) kind=disk ;;
    nfs*,*proto=rdma*) kind=fabric ;;
    esac
    case $kind,$drive in
    unordered,*) add no "$path" both "$on, not data=ordered" "mount it with -o data=ordered" ;;
    disk,nvme) add yes "$path" - "$on" ;;
    disk,nvme-of | disk,raid) add partly "$path" p2pdma "$on, $drive: nvidia-fs only" ;;
    disk,mapper) add partly "$path" - "$on, a device mapper: not known" "look at gdscheck -p" ;;
    disk,*) add no "$path" both "$on is not NVMe" "ext4 or XFS on an NVMe drive" ;;
    fabric,* | lustre,* | wekafs,* | gpfs,* | beegfs,*)
        add partly "$path" p2pdma "$on: nvidia-fs only" ;;
    *) add no "$path" both "$on: no native mode reads it" "ext4 or XFS on an NVMe drive" ;;
    esac
}

gather() {
    found='' drive=''
    [ -z "$path" ] || find_mount
    look_at_system
    look_at_gpu
    look_at_driver
    look_at_nvidia_fs
    look_at_p2pdma
    look_at_settings
    [ -z "$path" ] || look_at_path
    nvfs=$(ruled_out 'both|nvidia-fs|install')
    p2p=$(ruled_out 'both|p2pdma')
    code=1
    [ -z "$(ruled_out 'both|nvidia-fs')" ] || code=2
    if [ -z "$nvfs" ] || [ -z "$p2p" ]; then code=0; fi
}
show_json() {
    printf '%s' "$found" | awk -F "$sep" -v code="$code" -v nvfs="$nvfs" -v p2p="$p2p" '
        function quoted(s) {
            gsub(/\\/, "&&", s); gsub(/"/, "\\\"", s); gsub(/[\001-\037]/, " ", s)
            return "\"" s "\""
        }
        BEGIN {
            out["both"] = "\"nvidia-fs\", \"p2pdma\""; out["p2pdma"] = "\"p2pdma\""
            out["nvidia-fs"] = out["install"] = "\"nvidia-fs\""
            printf "{\"exit_code\": %d, \"modes\": ", code
            printf "{\"nvidia-fs\": %s, \"p2pdma\": %s}, \"findings\": [",
                (nvfs == "" ? "true" : "false"), (p2p == "" ? "true" : "false")
        }
        {
            printf "%s\n  {\"name\": %s, \"verdict\": %s, \"detail\": %s, ", (NR > 1 ? "," : ""),
                quoted($2), quoted($1), quoted($4)
            printf "\"hint\": %s, \"rules_out\": [%s], \"installable\": %s}",
                quoted($5), out[$3], ($3 == "install" ? "true" : "false")
        }
        END { print "\n]}" }'
}
show() {
    printf '%s' "$found" | awk -F "$sep" '{
        printf "%-6s  %-14s  %s\n", $1, $2, $4
        if ($5 != "") printf "%-6s  %-14s  hint: %s\n", "", "", $5
    }'
    printf '\nnvidia-fs:  %s\n' "${nvfs:+no: }${nvfs:-ready}"
    printf 'PCI P2PDMA: %s\n' "${p2p:+no: }${p2p:-ready}"
    case $code in
    0) echo "A native mode is ready." ;;
    1) echo "This script can install nvidia-fs, all that its mode lacks." ;;
    2) echo "For these reasons this script cannot make it work here; loads go through DRAM." ;;
    esac
}

run() {
    printf '+ %s\n' "$*"
    [ "$action" = dry ] || DEBIAN_FRONTEND=noninteractive "$@" ||
        die "that failed: $* (why a module does not build or load: dkms status, dmesg)"
}
install_module() {
    if [ -n "$add_repo" ]; then
        [ "$(dpkg-deb -f "$add_repo" Package 2>/dev/null)" = cuda-keyring ] ||
            die "$add_repo is not NVIDIA's cuda-keyring package. Nothing was changed."
        run dpkg -i "$add_repo"
    elif ! repository; then
        die "NVIDIA's apt repository is not configured. NVIDIA's CUDA installation guide has its" \
            "cuda-keyring package: name that with --add-repo=PACKAGE. Nothing was changed."
    fi
    run apt-get update
    # nvidia-gds has cuFile and gdscheck too; the headers are what the module is built with.
    package=nvidia-gds
    if ! candidate nvidia-gds && candidate nvidia-fs-dkms; then package=nvidia-fs-dkms; fi
    if candidate "linux-headers-$kernel"; then package="linux-headers-$kernel $package"; fi
    # shellcheck disable=SC2086 # two packages in one word
    run apt-get install -y --no-remove $package
}

gather
if [ "$action" = check ] || [ "$code" != 1 ]; then
    if [ -n "$json" ]; then show_json; else show; fi
    [ "$action" = check ] || [ "$code" != 0 ] || say "nothing to do"
    exit "$code"
fi
[ "$action" = dry ] || [ "$(id -u)" = 0 ] ||
    die "installing needs root; --check and --dry-run do not. Nothing was changed."
built || install_module
run modprobe nvidia-fs
[ "$action" != dry ] || exit 0
gather
show
exit "$code"
