#!/usr/bin/env bash
# The last step of an image: the user, no rights beyond his, no keys, the lists of packages, and
# nothing that differs between two builds of the same files.
#
#   docker/finish_image.sh VERSION [PACKAGES]      in the image, as root; PACKAGES as of pin_packages.sh
set -euo pipefail

version=$1 share=/usr/local/share/sluice
export SOURCE_DATE_EPOCH=0

# Some bases have another user 1000.
if other=$(getent passwd 1000); then userdel -r "${other%%:*}" 2>/dev/null || true; fi
getent group sluice >/dev/null || groupadd --gid 1000 sluice
useradd --uid 1000 --gid 1000 --no-log-init --create-home --shell /bin/bash sluice
# Group 0, as clusters give it to a user without a name.
install -d -o 1000 -g 0 -m 775 /work
install -d -m 755 /etc/sluice/ssh

# sshd of the user needs neither host keys nor services made by its package.
rm -f /etc/ssh/ssh_host_*
# The list of what is installed.
packages() {
  dpkg-query -W -f '${Package}=${Version}\n' | LC_ALL=C sort
}
packages >"$share/packages.txt"
for package in ${2-}; do
  found=$(awk -F= -v name="${package%%=*}" '$1 == name' "$share/packages.txt")
  if [[ -n $found && $found != "$package" ]]; then
    echo "sluice image: $package cannot be installed: the base or apt's sources have $found" >&2
    exit 2
  fi
done

# SPDX 2.3, in its tag-value form.
{
  printf 'SPDXVersion: SPDX-2.3\nDataLicense: CC0-1.0\nSPDXID: SPDXRef-DOCUMENT\n'
  printf 'DocumentName: sluice-image\n'
  printf 'DocumentNamespace: https://spdx.org/spdxdocs/sluice-%s-%s\n' "$version" \
    "$(sha256sum <"$share/packages.txt" | cut -c1-32)"
  printf 'Creator: Tool: sluice-finish-image\nCreated: 1970-01-01T00:00:00Z\n'
  # $1 name, $2 version, $3 licence, $4 id
  entry() {
    printf '\nPackageName: %s\nSPDXID: SPDXRef-%s\nPackageVersion: %s\n' "$1" "$4" "$2"
    printf 'PackageDownloadLocation: NOASSERTION\nFilesAnalyzed: false\n'
    printf 'PackageLicenseConcluded: %s\nPackageLicenseDeclared: %s\n' "$3" "$3"
    printf 'PackageCopyrightText: NOASSERTION\n'
    printf 'Relationship: SPDXRef-DOCUMENT DESCRIBES SPDXRef-%s\n' "$4"
  }
  entry sluice "$version" Apache-2.0 sluice
  while IFS='=' read -r name number; do
    entry "$name" "$number" NOASSERTION "package-${name//[^A-Za-z0-9.-]/-}"
  done <"$share/packages.txt"
} >"$share/sluice.spdx"

# Caches, logs and backups, which have the time of the build in them.
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/* /var/cache/ldconfig/* /var/log/* \
  /etc/apt/preferences.d/sluice /etc/machine-id /var/lib/dbus/machine-id /var/lib/systemd \
  /var/lib/dpkg/*-old /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid- \
  /run/* /tmp/* /var/tmp/* /root/.cache "$share/finish_image.sh" "$share/pin_packages.sh" \
  "$share/libraries.txt"
find / -xdev -name '__pycache__' -prune -exec rm -rf {} +
# Nobody gains rights here, and only /tmp and /var/tmp are everybody's.
find / -xdev -perm /6000 \( -type f -o -type d \) -exec chmod a-s {} +
find / -xdev ! -type l -perm -002 ! -path /tmp ! -path /var/tmp ! -path '/dev/*' ! -path '/proc/*' \
  ! -path '/sys/*' -exec chmod o-w {} +
