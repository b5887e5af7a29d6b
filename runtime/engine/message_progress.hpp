// Advances an engine's messages, and sums over replicas, while operators of a step run on a CPU.
#pragma once

#include <exception>
#include <utility>

#include <sluice/compute.hpp>

#include "comm/base/steady_seconds.hpp"
#include "comm/group/host_sums.hpp"
#include "comm/group/transport.hpp"
#include "runtime/engine/sharded_values.hpp"
#include "stages/compute/context_access.hpp"

namespace sluice {

class MessageProgress final : public ProgressHook {
 public:
  // All outlive it. `sums` and `sharded` may be null.
  MessageProgress(ComputeContext& compute, Transport& transport, HostSums* sums,
                  ShardedValues* sharded = nullptr)
      : compute_(compute), transport_(transport), sums_(sums), sharded_(sharded) {}

  // While it exists, operators advance messages and sums.
  class Scope {
   public:
    explicit Scope(MessageProgress& messages) : compute_(messages.compute_) {
      messages.error_ = nullptr;  // of a run that another error ended
      ContextAccess::set_progress_hook(compute_, &messages);
    }
    ~Scope() { ContextAccess::set_progress_hook(compute_, nullptr); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    ComputeContext& compute_;
  };

  // Throws what a message or a sum has thrown meanwhile.
  void rethrow() {
    if (error_ != nullptr) [[unlikely]] {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  void progress() noexcept override {
    const double now = steady_seconds();
    if (now < next_ || error_ != nullptr) return;
    try {
      transport_.progress();
      if (sums_ != nullptr) sums_->progress();
      if (sharded_ != nullptr) sharded_->progress();
    } catch (...) {
      error_ = std::current_exception();
    }
    next_ = now + kInterval;
  }

 private:
  // Seconds. A call of MPI costs about a microsecond; a socket's buffer lasts for milliseconds.
  static constexpr double kInterval = 1e-4;

  ComputeContext& compute_;
  Transport& transport_;
  HostSums* sums_;
  ShardedValues* sharded_;
  std::exception_ptr error_;
  double next_ = 0;
};

}  // namespace sluice
