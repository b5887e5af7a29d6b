// The frame of a pipeline's calls: all ranks make the same ones, and an error of any rank ends them
// on all. Internal to the pipeline.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <sluice/error.hpp>

#include "runtime/pipeline/call.hpp"
#include "runtime/pipeline/pipeline_parts.hpp"
#include "stages/compute/thread_team.hpp"

namespace sluice {

class PipelineCalls {
 public:
  explicit PipelineCalls(PipelineParts& parts) : parts_(parts) {}

  // A call that runs functions of the caller's.
  class InCall {
   public:
    explicit InCall(PipelineCalls& calls) : busy_(calls.busy_), before_(busy_.exchange(true)) {}
    ~InCall() { busy_ = before_; }
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;

   private:
    std::atomic<bool>& busy_;
    const bool before_;
  };

  // Collective. Runs `body`; what any rank throws ends the pipeline.
  template <typename Body>
  void guarded(const Body& body) {
    require_open();
    const ThreadTeam team(*parts_.compute);
    const ActivityScope calling(*parts_.job.activity, Doing::kCalling);
    const InCall in_call(*this);
    try {
      parts_.job.guarded(std::cref(body));
    } catch (const Error& error) {
      failed_ = error;
      throw;
    }
  }
  // The same, with a device that is set and errors of memory that name `who`.
  template <typename Body>
  void guarded(const std::string& who, const Body& body) {
    guarded([&] {
      use_device(parts_.compute->device());
      parts_.rethrow_oom_with_plan(who, body);
    });
  }
  // Throws what all ranks refuse; as BatchFeed::agree().
  void agree(Call call, const Batch* batch, std::int64_t argument = 0,
             const std::function<void()>& check = {});
  // guarded(), where `body` may throw Refused: all ranks throw its Error, and the control channel,
  // which keeps what it reports for good, gets none.
  template <typename Body>
  void refusable(const Body& body) {
    std::optional<Error> refusal;
    guarded([&] {
      try {
        body();
      } catch (const Refused& refused) {
        refusal = refused.error;
      }
    });
    if (refusal) throw Error(*refusal);
  }
  template <typename Body>
  void refusable(const std::string& who, const Body& body) {
    refusable([&] {
      use_device(parts_.compute->device());
      parts_.rethrow_oom_with_plan(who, body);
    });
  }
  // As PipelineAccess::run_call().
  void run_call(Call call, const std::string& who, const std::function<void()>& body);
  void close();
  void require_idle() const;
  void require_open() const;
  [[nodiscard]] bool usable() const { return !closed_ && !failed_; }
  [[nodiscard]] const Error* failure() const { return failed_ ? &*failed_ : nullptr; }

 private:
  PipelineParts& parts_;
  bool closed_ = false;
  std::optional<Error> failed_;
  std::atomic<bool> busy_ = false;  // in a call; a source may ask from its own thread
};

}  // namespace sluice
