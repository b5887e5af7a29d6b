// The part of NCCL that Sluice calls, between threads of one process, or between processes where
// SLUICE_EMULATED_NCCL=processes says that every rank is one; with =unreachable they never meet. A
// communicator runs its
// groups one after the other, whatever streams they are put on; a group holds its stream until all
// its operations have met their counterparts. In non-blocking mode a group is put on its stream
// only by the second ncclCommGetAsyncError after ncclGroupEnd, since NCCL promises nothing before
// that call says ncclSuccess: code that records an event too early misses the group here for
// certain.
#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/emulated_cuda/clique.hpp"
#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/memory.hpp"
#include "tests/emulated_cuda/process_clique.hpp"
#include "tests/emulated_cuda/stream.hpp"

using sluice::emulated::Clique;
using sluice::emulated::Operation;
using sluice::emulated::OperationKind;
using sluice::emulated::Ticket;

namespace sluice::emulated {

namespace {

struct Issued {
  Operation operation;
  cudaStream_t stream;
};

}  // namespace

}  // namespace sluice::emulated

struct ncclComm {
  int device = -1;
  bool is_blocking = true;
  // Set at once by an initialisation; by a split once all ranks have called.
  std::shared_ptr<Clique::Membership> membership = std::make_shared<Clique::Membership>();
  std::shared_ptr<Clique> parent;                 // of a split
  std::vector<sluice::emulated::Issued> pending;  // a group that is on no stream so far
  bool has_been_polled = false;                   // since `pending` was filled
  bool is_finalizing = false;
  int groups = 0;
  Ticket last;  // of the last group
  std::atomic<ncclResult_t> failure = ncclSuccess;

  [[nodiscard]] bool is_known() const { return parent == nullptr || parent->is_known(*membership); }
  [[nodiscard]] Clique& clique() const { return *membership->clique; }
};

namespace sluice::emulated {

namespace {

thread_local std::string last_message;

ncclResult_t refuse(ncclResult_t status, std::string message) {
  last_message = std::move(message);
  return status;
}

// What a thread has put into its group.
struct Group {
  int depth = 0;
  std::vector<std::pair<ncclComm_t, Issued>> issued;
  std::vector<ncclComm_t> initializing;
};
thread_local Group group;

// Cliques by unique id until all ranks have come; for the life of the process.
struct Cliques {
  std::mutex mutex;
  std::uint64_t next = 1;
  std::map<std::uint64_t, std::pair<std::shared_ptr<Clique>, int>> waiting;  // with ranks to come
};

Cliques& cliques() {
  static Cliques* const instance = new Cliques;
  return *instance;
}

// What ncclGetUniqueId() writes.
struct Id {
  std::uint64_t number = 0;
  std::int64_t process = 0;
};

bool processes_are(const char* what) {
  const char* text = std::getenv("SLUICE_EMULATED_NCCL");
  return text != nullptr && std::strcmp(text, what) == 0;
}

std::shared_ptr<Clique> clique_of(const ncclUniqueId& given, int ranks) {
  Id id;
  std::memcpy(&id, given.internal, sizeof id);
  const std::uint64_t number = id.number;
  if (ranks > 1 && (processes_are("processes") || processes_are("unreachable"))) {
    const auto process = processes_are("unreachable") ? std::int64_t{::getpid()} : id.process;
    return std::make_shared<ProcessClique>(ranks,
                                           std::to_string(process) + "-" + std::to_string(number));
  }
  Cliques& all = cliques();
  const std::lock_guard lock(all.mutex);
  if (id.process != ::getpid() || number == 0 || number >= all.next) return nullptr;
  auto& [clique, to_come] = all.waiting[number];
  if (clique == nullptr) {
    clique = std::make_shared<Clique>(ranks);
    to_come = ranks;
  }
  if (clique->ranks() != ranks) return nullptr;
  const std::shared_ptr<Clique> found = clique;
  if (--to_come == 0) all.waiting.erase(number);
  return found;
}

// Whether rank:group of SLUICE_EMULATED_NCCL_FAILURE is this one.
bool shall_fail(int rank, int number) {
  const char* text = std::getenv("SLUICE_EMULATED_NCCL_FAILURE");
  int failing_rank = -1, failing_group = -1;
  return text != nullptr && std::sscanf(text, "%d:%d", &failing_rank, &failing_group) == 2 &&
         failing_rank == rank && failing_group == number;
}

ncclResult_t launch(ncclComm_t comm, const std::vector<Issued>& issued) {
  std::vector<Operation> operations;
  for (const Issued& one : issued) operations.push_back(one.operation);
  cudaStream_t stream = issued.front().stream;
  const int rank = comm->membership->rank;
  const std::shared_ptr<Clique> clique = comm->membership->clique;
  enqueue_wait(stream, comm->last);
  for (const Issued& one : issued) {
    if (one.stream != stream) enqueue_wait(stream, last_ticket(one.stream));
  }
  if (shall_fail(rank, comm->groups++)) {
    comm->failure = ncclRemoteError;
    enqueue(stream, [clique, rank] { clique->wait_for_abort(rank); });
  } else {
    enqueue(stream, [clique, rank, operations = std::move(operations)] {
      const AllDevicesOpen open;
      clique->run_group(rank, operations);
    });
  }
  comm->last = last_ticket(stream);
  for (const Issued& one : issued) {
    if (one.stream != stream) enqueue_wait(one.stream, comm->last);
  }
  return ncclSuccess;
}

void launch_pending(ncclComm_t comm) {
  if (comm->pending.empty()) return;
  launch(comm, std::exchange(comm->pending, {}));
}

// ncclInProgress while the communicator is being made.
ncclResult_t readiness(ncclComm_t comm) {
  if (!comm->is_known()) return ncclInProgress;
  return comm->clique().status();
}

bool is_usable_buffer(ncclComm_t comm, const void* data, std::size_t bytes) {
  if (bytes == 0) return true;
  const Memory memory = memory_of(data, bytes);
  return memory.is_inside &&
         (memory.kind == MemoryKind::kPageLocked ||
          (memory.kind == MemoryKind::kDevice && memory.device == comm->device));
}

// `source_count` and `target_count` elements are read and written at the operation's addresses.
ncclResult_t issue(ncclComm_t comm, Operation operation, std::size_t source_count,
                   std::size_t target_count, cudaStream_t stream) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, "the communicator is null");
  if (comm->failure != ncclSuccess) return comm->failure;
  if (const ncclResult_t ready = readiness(comm); ready != ncclSuccess || !comm->pending.empty()) {
    return refuse(ncclInvalidArgument,
                  "the communicator was used before its last operation said ncclSuccess");
  }
  const std::size_t size = size_of(operation.type);
  if (size == 0) return refuse(ncclInvalidArgument, "a type the emulation lacks");
  if (operation.peer < 0 || operation.peer >= comm->clique().ranks()) {
    return refuse(ncclInvalidArgument, "no such rank: " + std::to_string(operation.peer));
  }
  if (!is_usable_buffer(comm, operation.source, source_count * size) ||
      !is_usable_buffer(comm, operation.target, target_count * size)) {
    return refuse(ncclInvalidArgument,
                  "a buffer is not inside memory of the communicator's device");
  }
  cudaStream_t real = resolve(stream);
  if (real == nullptr || device_of(real) != comm->device) {
    return refuse(ncclInvalidUsage, "the stream is not one of the communicator's device");
  }
  if (is_capturing(real))
    return refuse(ncclInvalidUsage, "the emulation records no NCCL in graphs");
  ncclGroupStart();
  group.issued.push_back({comm, {operation, real}});
  return ncclGroupEnd();
}

// What a communicator does right after it was made.
ncclResult_t begin(ncclComm_t comm) {
  if (!comm->is_blocking) return ncclInProgress;
  if (group.depth > 0) {
    group.initializing.push_back(comm);
    return ncclSuccess;
  }
  if (comm->parent != nullptr) comm->parent->wait_for(*comm->membership);
  return comm->clique().wait_for_all();
}

bool is_valid(const ncclConfig_t* config) {
  return config == nullptr || (config->magic == 0xcafebeef && config->size <= sizeof *config);
}

// What configurations and calls have asked for.
struct Asked {
  std::mutex mutex;
  std::vector<int> most_blocks;
  std::vector<std::size_t> all_reduces;
};
Asked asked;
std::atomic<int> aborted = 0;

// Memory that communicators were told of.
struct Registered {
  std::mutex mutex;
  std::map<void*, std::size_t> memory;
};
Registered registered;
std::atomic<ncclResult_t> status_of_new = ncclSuccess;

void note_blocks(const ncclConfig_t* config) {
  const std::lock_guard lock(asked.mutex);
  asked.most_blocks.push_back(config == nullptr ? NCCL_CONFIG_UNDEF_INT : config->maxCTAs);
}

bool is_blocking(const ncclConfig_t* config, bool standard) {
  if (config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT) return standard;
  return config->blocking != 0;
}

}  // namespace

void fail_communicator(ncclComm_t communicator, ncclResult_t failure) {
  communicator->failure = failure;
}

void set_communicator_status(ncclResult_t status) { status_of_new = status; }

std::vector<int> most_blocks_asked() {
  const std::lock_guard lock(asked.mutex);
  return asked.most_blocks;
}

std::vector<std::size_t> all_reduce_sizes() {
  const std::lock_guard lock(asked.mutex);
  return asked.all_reduces;
}

int aborted_communicators() { return aborted; }

std::size_t registered_bytes() {
  const std::lock_guard lock(registered.mutex);
  std::size_t bytes = 0;
  for (const auto& [data, size] : registered.memory) bytes += size;
  return bytes;
}

}  // namespace sluice::emulated

using namespace sluice::emulated;  // NOLINT(google-build-using-namespace): the C functions below

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t status) {
  switch (status) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t /*comm*/) { return last_message.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Cliques& all = cliques();
  const std::lock_guard lock(all.mutex);
  *id = {};
  const Id made{all.next++, ::getpid()};
  std::memcpy(id->internal, &made, sizeof made);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (device_count() == 0) return refuse(ncclUnhandledCudaError, "no device");
  if (comm == nullptr || ranks < 1 || rank < 0 || rank >= ranks || !is_valid(config)) {
    return refuse(ncclInvalidArgument, "a rank out of range or a config without initializer");
  }
  *comm = nullptr;
  const std::shared_ptr<Clique> clique = clique_of(id, ranks);
  if (clique == nullptr) {
    return refuse(ncclInvalidArgument, "an id of another process or for another number of ranks");
  }
  auto made = std::make_unique<ncclComm>();
  made->device = current_device();
  made->is_blocking = is_blocking(config, true);
  made->membership->clique = clique;
  made->membership->rank = rank;
  if (clique->arrive(rank, made->device) != ncclSuccess) {
    return refuse(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank) +
                                        " on device " + std::to_string(made->device));
  }
  made->failure = status_of_new.load();
  *comm = made.release();
  note_blocks(config);
  return begin(*comm);
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  if (comm == nullptr || made == nullptr || !is_valid(config) ||
      (color < 0 && color != NCCL_SPLIT_NOCOLOR)) {
    return refuse(ncclInvalidArgument, "a split needs a communicator and a color");
  }
  if (readiness(comm) != ncclSuccess || !comm->pending.empty()) {
    return refuse(ncclInvalidArgument, "the communicator is not ready to be split");
  }
  auto own = std::make_unique<ncclComm>();
  own->device = comm->device;
  own->is_blocking = is_blocking(config, comm->is_blocking);
  own->parent = comm->membership->clique;
  own->parent->split(comm->membership->rank, comm->device, color, key, own->membership);
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  *made = own.release();
  return begin(*made);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* status) {
  if (comm == nullptr || status == nullptr) return refuse(ncclInvalidArgument, "null");
  *status = comm->failure;
  if (*status == ncclSuccess) *status = readiness(comm);
  if (*status == ncclSuccess) *status = comm->clique().failure();
  if (*status == ncclSuccess && !comm->pending.empty()) {
    if (std::exchange(comm->has_been_polled, true)) {
      launch_pending(comm);
      *status = comm->failure;
    } else {
      *status = ncclInProgress;
    }
  }
  if (*status == ncclSuccess && comm->is_finalizing && !comm->last.is_done()) {
    *status = ncclInProgress;
  }
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  if (comm == nullptr || readiness(comm) != ncclSuccess) return ncclInvalidArgument;
  *count = comm->clique().ranks();
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  if (comm == nullptr || readiness(comm) != ncclSuccess) return ncclInvalidArgument;
  *rank = comm->membership->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  if (comm == nullptr) return ncclInvalidArgument;
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm == nullptr || readiness(comm) != ncclSuccess) return ncclInvalidArgument;
  launch_pending(comm);
  comm->is_finalizing = true;
  if (!comm->is_blocking) return ncclInProgress;
  comm->last.wait();
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  if (comm->is_known()) launch_pending(comm);
  comm->last.wait();
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  ++aborted;
  if (comm->is_known()) comm->clique().abort(comm->membership->rank);
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* data, size_t bytes, void** handle) {
  if (comm == nullptr || handle == nullptr || bytes == 0 || !is_usable_buffer(comm, data, bytes)) {
    return refuse(ncclInvalidArgument, "no memory of the communicator's device");
  }
  const std::lock_guard lock(registered.mutex);
  *handle = data;
  registered.memory.emplace(data, bytes);
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  const std::lock_guard lock(registered.mutex);
  if (comm == nullptr || registered.memory.erase(handle) == 0) {
    return refuse(ncclInvalidArgument, "no registered memory");
  }
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return ncclSuccess;
  ncclResult_t status = ncclSuccess;
  const auto combine = [&status](ncclResult_t other) {
    if (status == ncclSuccess || status == ncclInProgress) {
      status = other == ncclSuccess ? status : other;
    }
  };
  for (ncclComm_t comm : std::exchange(group.initializing, {})) combine(begin(comm));
  const auto issued = std::exchange(group.issued, {});
  std::vector<ncclComm_t> communicators;  // by their first operation
  for (const auto& [comm, one] : issued) {
    if (comm->pending.empty()) communicators.push_back(comm);
    comm->pending.push_back(one);
  }
  for (ncclComm_t comm : communicators) {
    comm->has_been_polled = false;
    if (comm->is_blocking) {
      combine(launch(comm, std::exchange(comm->pending, {})));
    } else {
      combine(ncclInProgress);
    }
  }
  return status;
}

ncclResult_t ncclSend(const void* source, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return issue(
      comm,
      {.kind = OperationKind::kSend, .source = source, .count = count, .type = type, .peer = peer},
      count, 0, stream);
}

ncclResult_t ncclRecv(void* target, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return issue(comm,
               {.kind = OperationKind::kReceive,
                .target = target,
                .count = count,
                .type = type,
                .peer = peer},
               0, count, stream);
}

ncclResult_t ncclAllReduce(const void* source, void* target, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  {
    const std::lock_guard lock(asked.mutex);
    asked.all_reduces.push_back(count);
  }
  return issue(comm,
               {.kind = OperationKind::kAllReduce,
                .source = source,
                .target = target,
                .count = count,
                .type = type,
                .reduction = reduction},
               count, count, stream);
}

ncclResult_t ncclReduceScatter(const void* source, void* target, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
                               cudaStream_t stream) {
  const std::size_t ranks = comm == nullptr || readiness(comm) != ncclSuccess
                                ? 1
                                : static_cast<std::size_t>(comm->clique().ranks());
  return issue(comm,
               {.kind = OperationKind::kReduceScatter,
                .source = source,
                .target = target,
                .count = count,
                .type = type,
                .reduction = reduction},
               count * ranks, count, stream);
}

ncclResult_t ncclAllGather(const void* source, void* target, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  const std::size_t ranks = comm == nullptr || readiness(comm) != ncclSuccess
                                ? 1
                                : static_cast<std::size_t>(comm->clique().ranks());
  return issue(comm,
               {.kind = OperationKind::kAllGather,
                .source = source,
                .target = target,
                .count = count,
                .type = type},
               count, count * ranks, stream);
}

ncclResult_t ncclBroadcast(const void* source, void* target, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  const bool is_root =
      comm != nullptr && readiness(comm) == ncclSuccess && comm->membership->rank == root;
  return issue(comm,
               {.kind = OperationKind::kBroadcast,
                .source = source,
                .target = target,
                .count = count,
                .type = type,
                .peer = root},
               is_root ? count : 0, count, stream);
}
