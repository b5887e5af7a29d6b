#include "runtime/process/process.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <iostream>
#include <string_view>
#include <system_error>

#include "comm/base/caught_error.hpp"

namespace sluice {

void flush_stdout() {
  std::cout.flush();
  std::fflush(stdout);
}

void require_stdout() {
  flush_stdout();
  if (std::ferror(stdout) == 0 && std::cout) return;
  throw Error(ErrorCode::kIo, "cannot write to standard output");
}

Error current_error() {
  try {
    throw;
  } catch (const std::system_error& error) {
    // fmt::print() throws where the output takes no more.
    if (std::ferror(stdout) == 0) return caught_error();
    return {ErrorCode::kIo, "cannot write to standard output: " + error.code().message()};
  } catch (...) {
    return caught_error();
  }
}

int print_error(const Error& error) {
  flush_stdout();
  // One write, so that lines of several processes do not mix.
  const bool named = error.rank() >= 0 && error.code() != ErrorCode::kUsage;
  const std::string line = fmt::format("sluice: error: {}{}\n", error.what(),
                                       named ? fmt::format(" [rank {}]", error.rank()) : "");
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
  return exit_code(error.code());
}

int run_guarded(const std::function<void()>& body) {
  try {
    body();
    require_stdout();
    return 0;
  } catch (...) {
    return print_error(current_error());
  }
}

namespace {

// The number that the first of these environment variables with a number has; else `otherwise`.
int number_of(std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names) {
    const char* text = std::getenv(name);
    if (text != nullptr && *text >= '0' && *text <= '9') return std::atoi(text);
  }
  return otherwise;
}

}  // namespace

int launched_rank() {
  return number_of(
      {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "MV2_COMM_WORLD_RANK"}, -1);
}

int launched_size() {
  return number_of({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "MV2_COMM_WORLD_SIZE"}, 1);
}

bool terminal_output() {
  if (::isatty(STDOUT_FILENO) == 0) return false;
  if (launched_rank() < 0) return true;
  const std::string link = fmt::format("/proc/{}/fd/{}", ::getppid(), STDOUT_FILENO);
  std::array<char, 64> target = {};
  const ssize_t length = ::readlink(link.c_str(), target.data(), target.size() - 1);
  const std::string_view name(target.data(), length > 0 ? static_cast<std::size_t>(length) : 0);
  return name.starts_with("/dev/pts/") || name.starts_with("/dev/tty");
}

}  // namespace sluice
