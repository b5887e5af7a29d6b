#include "runtime/pipeline/pipeline_calls.hpp"

#include <fmt/core.h>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

Doing doing_of(Call call) {
  switch (call) {
    case Call::kSave:
    case Call::kState:
      return Doing::kSaving;
    case Call::kLoad:
    case Call::kSetState:
      return Doing::kRestoring;
    case Call::kClose:
      return Doing::kClosing;
    default:
      return Doing::kCalling;
  }
}

}  // namespace

void PipelineCalls::agree(Call call, const Batch* batch, std::int64_t argument,
                          const std::function<void()>& check) {
  const BatchFeed::Asked asked{.call = call,
                               .step = parts_.step.done,
                               .argument = argument,
                               .batch = batch,
                               .targets = &parts_.step.targets_here};
  refusable([&] { parts_.feed->agree(asked, check); });
}

void PipelineCalls::run_call(Call call, const std::string& who, const std::function<void()>& body) {
  require_open();
  agree(call, nullptr);
  if (parts_.step.open() && (call == Call::kLoad || call == Call::kSetState)) {
    throw_usage(
        "other values in the middle of a step: optimizer_step() or drop_gradients() comes before "
        "set_state() and before loading");
  }
  refusable(who, [&] {
    const ActivityScope doing(*parts_.job.activity, doing_of(call));
    body();
  });
}

void PipelineCalls::close() {
  if (closed_) return;
  run_call(Call::kClose, "the end", [&] {
    parts_.job.set_progress_engine(nullptr);
    if (parts_.nccl != nullptr) parts_.nccl->finalize();
    parts_.job.world.collectives->barrier();
  });
  closed_ = true;
}

// Not guarded: the callback throws it on, and its caller is.
void PipelineCalls::require_idle() const {
  if (!busy_) return;
  throw_usage(
      "a pipeline is called from a callback of its own, in the middle of another call; legal "
      "there are functions that only read, such as step() and parameters()");
}

// Not guarded: the answer is the same on all ranks, and some may still be closing.
void PipelineCalls::require_open() const {
  require_idle();
  parts_.job.world.ranks->require_this_thread();
  if (closed_) throw_usage("the pipeline is closed");
  if (!failed_) return;
  throw Error(failed_->code(),
              fmt::format("the pipeline is unusable since an earlier error: {}", failed_->what()),
              failed_->rank());
}

}  // namespace sluice
