#include "comm/mpi/first_contact.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/local_ranks.hpp"
#include "comm/group/waiter.hpp"
#include "comm/mpi/mpi_check.hpp"
#include "comm/mpi/mpi_session.hpp"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

template <std::size_t kSize>
void put(std::array<char, kSize>& field, std::string_view text) {
  std::memcpy(field.data(), text.data(), std::min(text.size(), kSize - 1));
}

// Both messages consist of zero-terminated texts. Their sizes are the same in all versions.
struct Greeting {
  std::array<char, 256> build{}, mpi{}, host{};
};
struct Verdict {
  std::array<char, 16> code{};  // name_of(); empty: no error
  std::array<char, 1008> text{};
};

// An open request of MPI, and the memory that it reads or writes. Where a send is still open when
// this ends, MPI keeps the memory.
template <typename Message>
class Transfer {
 public:
  static Transfer send(const Message& message, int peer, int tag) {
    Transfer transfer(message);
    check_mpi(MPI_Isend(transfer.message_.get(), sizeof(Message), MPI_BYTE, peer, tag,
                        MPI_COMM_WORLD, &transfer.request_),
              "MPI_Isend");
    return transfer;
  }
  static Transfer receive(int peer, int tag) {
    Transfer transfer(Message{});
    transfer.receives_ = true;
    check_mpi(MPI_Irecv(transfer.message_.get(), sizeof(Message), MPI_BYTE, peer, tag,
                        MPI_COMM_WORLD, &transfer.request_),
              "MPI_Irecv");
    return transfer;
  }
  Transfer(Transfer&& other) noexcept
      : message_(std::move(other.message_)),
        request_(std::exchange(other.request_, MPI_REQUEST_NULL)),
        receives_(other.receives_) {}
  Transfer& operator=(Transfer&&) = delete;
  ~Transfer() {
    if (request_ == MPI_REQUEST_NULL) return;
    if (receives_) {
      MPI_Cancel(&request_);
      MPI_Wait(&request_, MPI_STATUS_IGNORE);
    } else if (int sent = 0;
               MPI_Test(&request_, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS || sent == 0) {
      (void)message_.release();
    }
  }
  bool done() {
    int flag = 0;
    check_mpi(MPI_Test(&request_, &flag, MPI_STATUS_IGNORE), "MPI_Test");
    return flag != 0;
  }
  [[nodiscard]] const Message& message() const { return *message_; }

 private:
  explicit Transfer(const Message& message) : message_(std::make_unique<Message>(message)) {}

  std::unique_ptr<Message> message_;
  MPI_Request request_ = MPI_REQUEST_NULL;
  bool receives_ = false;
};

template <typename Message>
using Transfers = std::vector<Transfer<Message>>;

// The indices of the transfers that are not done by `deadline`.
template <typename Message>
std::vector<std::size_t> wait_all(Transfers<Message>& transfers, Clock::time_point deadline) {
  Waiter waiter(std::numeric_limits<int>::max());
  std::vector<std::size_t> open(transfers.size());
  for (std::size_t i = 0; i < open.size(); ++i) open[i] = i;
  while (true) {
    std::erase_if(open, [&](std::size_t i) { return transfers[i].done(); });
    if (open.empty() || Clock::now() > deadline) return open;
    waiter.pause();
  }
}

struct Refusal {
  ErrorCode code;
  std::string text;
};

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1e3; }

// `greetings`: [rank]; those of `silent` ranks are empty.
std::optional<Refusal> judge(const std::vector<Greeting>& greetings, const std::vector<int>& silent,
                             std::chrono::milliseconds limit) {
  if (!silent.empty()) {
    const std::string cause = silence_on_host(local_ranks(), static_cast<int>(greetings.size()));
    return Refusal{
        ErrorCode::kPeer,
        fmt::format("no message from rank{} {} reached rank 0 on {} within {} s: {}. "
                    "SLUICE_START_TIMEOUT=SECONDS allows more time",
                    silent.size() == 1 ? "" : "s", fmt::join(silent, ", "),
                    greetings[0].host.data(), seconds(limit),
                    cause.empty() ? "their hosts do not reach it, or their processes do not run: "
                                    "name the network that joins all hosts ('--mca "
                                    "btl_tcp_if_include NETWORK'), and open its ports"
                                  : cause)};
  }
  const auto differ = [&](const auto field, const char* what,
                          const char* cure) -> std::optional<Refusal> {
    for (std::size_t rank = 1; rank < greetings.size(); ++rank) {
      const Greeting& first = greetings[0];
      const Greeting& other = greetings[rank];
      if (first.*field == other.*field) continue;
      return Refusal{ErrorCode::kMismatch,
                     fmt::format("ranks have different {}: rank 0 on {} has '{}', rank {} on {} "
                                 "has '{}'; {}",
                                 what, first.host.data(), (first.*field).data(), rank,
                                 other.host.data(), (other.*field).data(), cure)};
    }
    return std::nullopt;
  };
  if (auto refusal = differ(&Greeting::build, "builds of Sluice", "copy one to every host")) {
    return refusal;
  }
  return differ(&Greeting::mpi, "MPI libraries", "install one version on every host");
}

void greet_all(const Greeting& mine, int ranks, int tag, std::chrono::milliseconds limit) {
  std::vector<Greeting> greetings(at(ranks));
  std::vector<int> silent;
  {
    Transfers<Greeting> arrivals;
    for (int peer = 1; peer < ranks; ++peer) {
      arrivals.push_back(Transfer<Greeting>::receive(peer, tag));
    }
    for (const std::size_t i : wait_all(arrivals, Clock::now() + limit)) {
      silent.push_back(static_cast<int>(i) + 1);
    }
    greetings[0] = mine;
    for (std::size_t i = 0; i < arrivals.size(); ++i) greetings[i + 1] = arrivals[i].message();
  }
  const std::optional<Refusal> refusal = judge(greetings, silent, limit);
  Verdict verdict;
  if (refusal) {
    put(verdict.code, name_of(refusal->code));
    put(verdict.text, refusal->text);
  }
  Transfers<Verdict> verdicts;
  for (int peer = 1; peer < ranks; ++peer) {
    if (std::find(silent.begin(), silent.end(), peer) != silent.end()) continue;
    verdicts.push_back(Transfer<Verdict>::send(verdict, peer, tag));
  }
  (void)wait_all(verdicts, Clock::now() + limit);
  if (refusal) throw Error(refusal->code, refusal->text, 0);
}

void greet_first(const Greeting& mine, int rank, int ranks, int tag,
                 std::chrono::milliseconds limit) {
  Transfers<Greeting> greetings;
  greetings.push_back(Transfer<Greeting>::send(mine, 0, tag));
  Transfers<Verdict> arrivals;
  arrivals.push_back(Transfer<Verdict>::receive(0, tag));
  // Rank 0 itself waits for `limit`.
  if (!wait_all(arrivals, Clock::now() + 2 * limit).empty()) {
    const std::string cause = silence_on_host(local_ranks(), ranks);
    throw Error(ErrorCode::kPeer,
                fmt::format("rank {} on {} hears nothing from rank 0 since {} s: {}", rank,
                            mine.host.data(), seconds(2 * limit),
                            cause.empty() ? "their hosts do not reach each other, or rank 0 does "
                                            "not run"
                                          : cause),
                rank);
  }
  (void)wait_all(greetings, Clock::now() + limit);
  const Verdict& verdict = arrivals.front().message();
  const std::string_view code(verdict.code.data());
  if (code.empty()) return;
  throw Error(code == name_of(ErrorCode::kPeer) ? ErrorCode::kPeer : ErrorCode::kMismatch,
              verdict.text.data(), 0);
}

}  // namespace

void make_first_contact(const std::string& build, std::chrono::milliseconds limit) {
  int rank = 0;
  int ranks = 1;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &ranks), "MPI_Comm_size");
  if (ranks == 1) return;
  const MpiInfo info = mpi_info();
  Greeting mine;
  put(mine.build, build);
  put(mine.mpi, info.library);
  put(mine.host, info.host);
  if (rank == 0) {
    greet_all(mine, ranks, info.tag_upper_bound, limit);
  } else {
    greet_first(mine, rank, ranks, info.tag_upper_bound, limit);
  }
}

}  // namespace sluice
