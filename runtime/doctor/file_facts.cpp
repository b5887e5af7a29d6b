#include "runtime/doctor/file_facts.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/engine/steady_seconds.hpp"
#include "runtime/files/checksum.hpp"
#include "runtime/files/random_id.hpp"
#include "runtime/files/read_file.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;
constexpr int kMostPieces = 16;

std::string cause_of(int error) { return std::generic_category().message(error); }

// Closed on scope exit.
class File {
 public:
  File(const fs::path& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

std::string name_of_file_system(const fs::path& path) {
  struct statfs state = {};
  if (::statfs(path.c_str(), &state) != 0) return "";
  constexpr std::pair<std::uint32_t, const char*> kNames[] = {
      {0x6969, "nfs"},         {0x0BD00BD0, "lustre"}, {0x47504653, "gpfs"}, {0x19830326, "beegfs"},
      {0x00C36400, "ceph"},    {0xFF534D42, "cifs"},   {0xFE534D42, "smb2"}, {0x65735546, "fuse"},
      {0x01021994, "tmpfs"},   {0xEF53, "ext4"},       {0x58465342, "xfs"},  {0x9123683E, "btrfs"},
      {0x794C7630, "overlay"}, {0x2FC12FC1, "zfs"},
  };
  for (const auto& [type, name] : kNames) {
    if (static_cast<std::uint32_t>(state.f_type) == type) return name;
  }
  return "";
}

// Directories and files that this rank made; they go with it.
class Made {
 public:
  Made() = default;
  Made(const Made&) = delete;
  Made& operator=(const Made&) = delete;
  ~Made() {
    std::error_code ignored;  // a directory stays where others have put files
    for (const fs::path& path : paths_) fs::remove(path, ignored);
  }

  // "" or why not.
  std::string directories(const fs::path& directory) {
    std::error_code error;
    for (fs::path path = directory; !path.empty() && !fs::exists(path, error) && !error;
         path = path.parent_path()) {
      paths_.push_back(path);
    }
    fs::create_directories(directory, error);
    return error ? error.message() : "";
  }
  void file(const fs::path& path) { paths_.push_back(path); }

 private:
  std::vector<fs::path> paths_;  // a directory stands before those around it
};

// Bytes per second into the facts, or the problem.
void measure_writing(const fs::path& file, double seconds, DirectoryFacts& facts) {
  const std::vector<std::byte> piece(kPiece, std::byte{0x5A});
  const double start = steady_seconds();
  const File out(file, O_WRONLY | O_CREAT | O_EXCL);
  if (out.fd() < 0) {
    facts.problem = cause_of(errno);
    return;
  }
  std::size_t written = 0;
  for (int i = 0; i < kMostPieces && (i == 0 || steady_seconds() < start + seconds); ++i) {
    const ::ssize_t n = ::write(out.fd(), piece.data(), piece.size());
    const bool synced = n == static_cast<::ssize_t>(kPiece) && ::fsync(out.fd()) == 0;
    if (!synced) {
      facts.problem =
          n < 0 || n == static_cast<::ssize_t>(kPiece) ? cause_of(errno) : cause_of(ENOSPC);
      return;
    }
    written += kPiece;
  }
  facts.bytes_per_second = static_cast<double>(written) / std::max(steady_seconds() - start, 1e-9);
}

// Seconds until the file is there; -1: not in time. Asks by its name alone, as a program would: a
// cache of names is part of what is measured.
double wait_for(const fs::path& file, double seconds) {
  const double start = steady_seconds();
  for (;;) {
    struct stat state = {};
    if (::stat(file.c_str(), &state) == 0) return steady_seconds() - start;
    if (steady_seconds() > start + seconds) return -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

DataFacts data_facts(const fs::path& path) {
  DataFacts facts;
  facts.path = path.string();
  try {
    const ReadFile file(path);
    facts.bytes = static_cast<std::int64_t>(file.bytes());
    const bool whole = is_hashed_whole(facts.bytes);
    std::vector<std::byte> bytes(static_cast<std::size_t>(whole ? facts.bytes : 2 * kHashedEnd));
    const std::span<std::byte> all(bytes);
    const auto end = static_cast<std::size_t>(kHashedEnd);
    const std::size_t got =
        whole ? file.read(all, 0)
              : file.read(all.first(end), 0) + file.read(all.subspan(end), file.bytes() - end);
    if (got < all.size()) throw ReadProblem("it became shorter while it was read");
    facts.hash = checksum_hex(bytes);
  } catch (const ReadProblem& problem) {
    facts.problem = problem.what();
  }
  return facts;
}

DirectoryFacts probe_directory(Collectives& collectives, const std::string& host,
                               const fs::path& path, const DirectoryLimits& limits) {
  const Communicator& comm = collectives.communicator();
  const std::vector<std::string> hosts = collectives.all_gather_strings(host);
  const bool of_first = hosts[at(comm.rank())] == hosts.front();
  const bool measures = std::find(hosts.begin(), hosts.end(), host) - hosts.begin() == comm.rank();
  DirectoryFacts facts;
  facts.path = path.string();
  // A start of a training removes what begins like this, should the process be killed here.
  const std::string id = collectives.broadcast_string(random_id(), 0);
  const auto file_of = [&](int rank) {
    return path / fmt::format("{}doctor-{}-{}", kVisiblePrefix, id, rank);
  };
  Made directories;
  std::optional<Made> file(std::in_place);
  if (comm.rank() == 0) facts.problem = directories.directories(path);
  collectives.barrier();
  // A file system remembers that a name is missing; a program that waits for a file has such names.
  if (!of_first) (void)wait_for(file_of(0), 0);
  collectives.barrier();
  if (comm.rank() == 0 && facts.problem.empty()) {
    file->file(file_of(0));
    measure_writing(file_of(0), limits.write_seconds, facts);
  }
  const bool made_it = collectives.broadcast_string(facts.problem, 0).empty();
  facts.seen_after = of_first ? 0 : made_it ? wait_for(file_of(0), limits.seen_seconds) : -1;
  if (measures && comm.rank() != 0) {
    file->file(file_of(comm.rank()));
    measure_writing(file_of(comm.rank()), limits.write_seconds, facts);
  }
  facts.file_system = name_of_file_system(path);
  collectives.barrier();  // nobody looks for a file that is removed now
  file.reset();
  collectives.barrier();  // nobody has a file where rank 0 removes the directory now
  return facts;
}

}  // namespace sluice
