// A request to stop by a signal, which may come before there is a saver.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <optional>

#include <sluice/checkpoint.hpp>
#include <sluice/program.hpp>

#include "runtime/job/activity.hpp"

namespace sluice {

// Without begin(), signals have their default action.
class StopRequest {
 public:
  StopRequest() = default;
  ~StopRequest() { signals_.reset(); }  // before what its handler uses
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  void begin() {
    signals_.emplace([this]() noexcept {
      asked_ = true;
      ActivityBoard::for_each([](ActivityBoard& board, void*) noexcept { board.expect_end(); },
                              nullptr);
      if (Checkpointer* saver = saver_) saver->request_stop();
    });
  }
  // Null before the saver goes.
  void set_saver(Checkpointer* saver) {
    saver_ = saver;
    if (saver != nullptr && asked_) saver->request_stop();
  }
  [[nodiscard]] bool asked() const { return asked_; }
  void describe(std::uint64_t step, const std::filesystem::path& save) {
    if (signals_) signals_->describe(step, save);
  }

 private:
  std::atomic<bool> asked_ = false;
  std::atomic<Checkpointer*> saver_ = nullptr;
  std::optional<StopSignals> signals_;
};

}  // namespace sluice
