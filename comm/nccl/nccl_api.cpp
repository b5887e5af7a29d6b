#include "comm/nccl/nccl_api.hpp"

#include <dlfcn.h>
#include <fmt/core.h>
#include <nccl.h>

#include <cstring>

#include <sluice/error.hpp>

namespace sluice::nccl {

namespace {

constexpr const char* kLibraryFile = "libnccl.so.2";
constexpr int kOldest = NCCL_VERSION(2, 19, 0);

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));

Result result_of(ncclResult_t code) {
  switch (code) {
    case ncclSuccess:
      return {Status::kSuccess, code};
    case ncclInProgress:
      return {Status::kInProgress, code};
    case ncclRemoteError:
      return {Status::kRemote, code};
    default:
      return {Status::kFailed, code};
  }
}

cudaStream_t native(StreamView stream) { return static_cast<cudaStream_t>(stream.native()); }

// NCCL's texts may end in, or hold, line breaks.
std::string one_line(const char* text) {
  std::string line = text == nullptr ? "" : text;
  for (char& letter : line) {
    if (letter == '\n' || letter == '\r' || letter == '\t') letter = ' ';
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

}  // namespace

// What a function is before open().
#ifdef SLUICE_NCCL_LINKED
#define SLUICE_LINKED(function) &function
#else
#define SLUICE_LINKED(function) nullptr
#endif

struct Library::Functions {
  decltype(&ncclGetVersion) get_version = SLUICE_LINKED(ncclGetVersion);
  decltype(&ncclGetUniqueId) get_unique_id = SLUICE_LINKED(ncclGetUniqueId);
  decltype(&ncclCommInitRankConfig) init_rank_config = SLUICE_LINKED(ncclCommInitRankConfig);
  decltype(&ncclCommGetAsyncError) get_async_error = SLUICE_LINKED(ncclCommGetAsyncError);
  decltype(&ncclCommFinalize) finalize = SLUICE_LINKED(ncclCommFinalize);
  decltype(&ncclCommDestroy) destroy = SLUICE_LINKED(ncclCommDestroy);
  decltype(&ncclCommAbort) abort = SLUICE_LINKED(ncclCommAbort);
  decltype(&ncclGroupStart) group_start = SLUICE_LINKED(ncclGroupStart);
  decltype(&ncclGroupEnd) group_end = SLUICE_LINKED(ncclGroupEnd);
  decltype(&ncclSend) send = SLUICE_LINKED(ncclSend);
  decltype(&ncclRecv) recv = SLUICE_LINKED(ncclRecv);
  decltype(&ncclAllReduce) all_reduce = SLUICE_LINKED(ncclAllReduce);
  decltype(&ncclGetErrorString) error_string = SLUICE_LINKED(ncclGetErrorString);
  decltype(&ncclGetLastError) last_error = SLUICE_LINKED(ncclGetLastError);
  // Null where the library has none.
  decltype(&ncclCommRegister) register_memory = SLUICE_LINKED(ncclCommRegister);
  decltype(&ncclCommDeregister) forget_memory = SLUICE_LINKED(ncclCommDeregister);
  int version = 0;

  void open(const char* file) {
    // Never unloaded: NCCL's own threads may outlive every communicator briefly.
    void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) {
      throw Error(ErrorCode::kDevice,
                  fmt::format("NCCL is missing: {} (install libnccl2 or use --transport mpi)",
                              one_line(dlerror())));
    }
    const auto look_up = [&](auto& pointer, const char* name) {
      void* symbol = dlsym(library, name);
      static_assert(sizeof(symbol) == sizeof(pointer));
      std::memcpy(&pointer, &symbol, sizeof(symbol));
      return symbol != nullptr;
    };
    const auto find = [&](auto& pointer, const char* name) {
      if (look_up(pointer, name)) return;
      throw Error(ErrorCode::kDevice,
                  fmt::format("NCCL in {} cannot be used: it has no {}", file, name));
    };
    look_up(register_memory, "ncclCommRegister");
    look_up(forget_memory, "ncclCommDeregister");
    find(get_version, "ncclGetVersion");
    find(get_unique_id, "ncclGetUniqueId");
    find(init_rank_config, "ncclCommInitRankConfig");
    find(get_async_error, "ncclCommGetAsyncError");
    find(finalize, "ncclCommFinalize");
    find(destroy, "ncclCommDestroy");
    find(abort, "ncclCommAbort");
    find(group_start, "ncclGroupStart");
    find(group_end, "ncclGroupEnd");
    find(send, "ncclSend");
    find(recv, "ncclRecv");
    find(all_reduce, "ncclAllReduce");
    find(error_string, "ncclGetErrorString");
    find(last_error, "ncclGetLastError");
  }
};

#undef SLUICE_LINKED

Library::Library(const char* file) {
  auto functions = std::make_shared<Functions>();
  if (file != nullptr || functions->get_version == nullptr) {
    functions->open(file == nullptr ? kLibraryFile : file);
  }
  const ncclResult_t code = functions->get_version(&functions->version);
  if (code != ncclSuccess || functions->version < kOldest ||
      functions->version / 10000 != NCCL_MAJOR) {
    throw Error(ErrorCode::kDevice,
                fmt::format("NCCL {} cannot be used: {}.19 to {}.x is needed, {} was built against",
                            version_text(functions->version), NCCL_MAJOR, NCCL_MAJOR,
                            version_text(NCCL_VERSION_CODE)));
  }
  functions_ = std::move(functions);
}

int Library::version() const { return functions_->version; }

Result Library::make_id(UniqueId& id) const {
  ncclUniqueId native_id;
  const ncclResult_t code = functions_->get_unique_id(&native_id);
  std::memcpy(id.bytes.data(), &native_id, sizeof(native_id));
  return result_of(code);
}

Result Library::init(Handle& comm, int ranks, const UniqueId& id, int rank, const char* name,
                     int most_blocks) const {
  ncclUniqueId native_id;
  std::memcpy(&native_id, id.bytes.data(), sizeof(native_id));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;  // names its size: an older library cuts it there
  config.blocking = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  config.commName = name;
#else
  static_cast<void>(name);
#endif
  if (most_blocks > 0) config.maxCTAs = most_blocks;
  return result_of(functions_->init_rank_config(&comm, ranks, native_id, rank, &config));
}

Result Library::state(Handle comm) const {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t code = functions_->get_async_error(comm, &state);
  return result_of(code == ncclSuccess ? state : code);
}

Result Library::finalize(Handle comm) const { return result_of(functions_->finalize(comm)); }

Result Library::destroy(Handle comm) const { return result_of(functions_->destroy(comm)); }

Result Library::abort(Handle comm) const { return result_of(functions_->abort(comm)); }

Result Library::group_start() const { return result_of(functions_->group_start()); }

Result Library::group_end() const { return result_of(functions_->group_end()); }

Result Library::send(const void* data, std::size_t bytes, int peer, Handle comm,
                     StreamView stream) const {
  return result_of(functions_->send(data, bytes, ncclInt8, peer, comm, native(stream)));
}

Result Library::recv(void* data, std::size_t bytes, int peer, Handle comm,
                     StreamView stream) const {
  return result_of(functions_->recv(data, bytes, ncclInt8, peer, comm, native(stream)));
}

Result Library::all_reduce_sum(float* values, std::size_t count, Handle comm,
                               StreamView stream) const {
  return result_of(
      functions_->all_reduce(values, values, count, ncclFloat32, ncclSum, comm, native(stream)));
}

void* Library::register_memory(Handle comm, void* data, std::size_t bytes) const {
  void* registered = nullptr;
  if (functions_->register_memory == nullptr || functions_->forget_memory == nullptr ||
      functions_->register_memory(comm, data, bytes, &registered) != ncclSuccess) {
    return nullptr;
  }
  return registered;
}

void Library::forget_memory(Handle comm, void* registered) const {
  static_cast<void>(functions_->forget_memory(comm, registered));
}

std::string Library::describe(const Result& result, Handle comm) const {
  const std::string name =
      one_line(functions_->error_string(static_cast<ncclResult_t>(result.code)));
  const std::string last = one_line(functions_->last_error(comm));
  return last.empty() ? name : fmt::format("{} ({})", name, last);
}

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace sluice::nccl
