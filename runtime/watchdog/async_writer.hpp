// Writes lines and files on a thread of its own, since a disk or a terminal may take for ever, and
// the watchdog's thread must not wait for either. The thread starts with the first use.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace sluice {

class AsyncWriter {
 public:
  AsyncWriter();
  // Waits for what is under way, for at most two seconds; what takes longer goes on without this.
  ~AsyncWriter();
  AsyncWriter(const AsyncWriter&) = delete;
  AsyncWriter& operator=(const AsyncWriter&) = delete;

  // To standard error, in one write.
  void say(std::string text);
  // The same, before this returns where that cannot block: for a process that may end at once.
  void say_now(std::string text);
  void run(std::function<void()> job);
  // Replaces `path`, whole or not at all. A failure is ignored: the next one may succeed.
  void replace(const std::filesystem::path& path, std::string text);
  // Makes a new file <stem>.txt in a directory, or <stem>-2.txt and so on where that exists. A
  // failure is said on standard error.
  void add_file(const std::filesystem::path& directory, const std::string& stem, std::string text);
  // Whether all of it is written now. Never blocks.
  [[nodiscard]] bool idle() const;

 private:
  struct State;
  void start();
  std::shared_ptr<State> state_;
};

}  // namespace sluice
