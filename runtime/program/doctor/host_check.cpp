#include "runtime/program/doctor/host_check.hpp"

#include <fmt/core.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <sstream>
#include <string_view>

#include "comm/base/host.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/files/writable.hpp"
#include "runtime/program/supervise/hosts.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMark = "sluice-host-check";
// Of ssh's own connection, and of the whole question.
constexpr int kConnectSeconds = 10, kSeconds = 20;

// What one host says. Subjects are mpi (the first line of 'mpirun --version'), daemon (the path of
// the launcher's), prefix (the daemon lies where this host has it), program (by --version), data
// (size and checksums, or "missing"), save ("seen" or "unseen").
struct Answer {
  std::string host;
  bool reached = false;
  std::string problem;  // the last line of ssh where it was not reached
  std::map<std::string, std::string> subjects;

  // Empty: it is not there, or was not asked for.
  [[nodiscard]] std::string says(const std::string& subject) const {
    return subjects.contains(subject) ? subjects.at(subject) : "";
  }
};

// This host, with which the others are compared.
struct Own {
  std::string daemon_name, prefix, program_path;
  Answer here;
};

// One word of a shell command.
std::string shell_word(std::string_view text) {
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? "'\\''" : std::string(1, c);
  return word + "'";
}

struct ShellResult {
  int code = -1;
  std::vector<std::string> lines;
};

ShellResult run_shell(const std::string& command) {
  ShellResult result;
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) throw_error(ErrorCode::kInternal, "cannot start a shell");
  std::string text;
  std::array<char, 4096> part{};
  while (const std::size_t count = std::fread(part.data(), 1, part.size(), pipe)) {
    text.append(part.data(), count);
  }
  const int status = ::pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty()) result.lines.push_back(line);
  }
  return result;
}

// Prints "<key> <value>" for every fact of the host it runs on.
std::string questions(const Own& own, const std::string& data, const fs::path& token) {
  std::string script = fmt::format(
      "echo {}\n"
      "echo mpi $(mpirun --version 2>/dev/null | head -n 1)\n"
      "echo daemon $(command -v {})\n",
      kMark, own.daemon_name);
  if (!own.prefix.empty()) {
    script += fmt::format("[ -x {} ] && echo prefix yes\n",
                          shell_word(own.prefix + "/bin/" + own.daemon_name));
  }
  const std::string program = shell_word(own.program_path);
  script += fmt::format("[ -x {0} ] && echo program $({0} --version 2>&1 | tail -n 1)\n", program);
  if (!data.empty()) {
    script += fmt::format(
        "if [ -r {0} ]; then echo data $(wc -c < {0}) bytes, checksums of both ends "
        "$(head -c 1048576 {0} | cksum | cut -d' ' -f1) $(tail -c 1048576 {0} | cksum | cut -d' ' "
        "-f1); else echo data missing; fi\n",
        shell_word(data));
  }
  if (!token.empty()) {
    script += fmt::format("if [ -e {} ]; then echo save seen; else echo save unseen; fi\n",
                          shell_word(token.string()));
  }
  return script;
}

Answer parse(const std::string& host, const ShellResult& result) {
  Answer answer;
  answer.host = host;
  for (const std::string& line : result.lines) {
    if (line == kMark) {
      answer.reached = true;
      continue;
    }
    if (!answer.reached) {
      answer.problem = line;
      continue;
    }
    const std::size_t space = line.find(' ');
    if (space != std::string::npos) answer.subjects[line.substr(0, space)] = line.substr(space + 1);
  }
  if (answer.reached) {
    answer.problem.clear();
  } else if (result.code == 124 || result.code == 137) {
    answer.problem = fmt::format("no answer within {} s", kSeconds);
  } else if (answer.problem.empty()) {
    answer.problem = fmt::format("ssh ends with code {}", result.code);
  }
  return answer;
}

bool is_this_host(const std::string& host) {
  const std::string own = host_name();
  return host == own || host == "localhost" || host == own.substr(0, own.find('.'));
}

Answer ask(const std::string& host, const std::string& ssh, const std::string& script) {
  const std::string shell = is_this_host(host)
                                ? "sh -s"
                                : fmt::format("{} -o BatchMode=yes -o ConnectTimeout={} {} sh -s",
                                              ssh, kConnectSeconds, shell_word(host));
  return parse(host, run_shell(fmt::format("timeout -k 2 {} {} 2>&1 <<'end-of-{}'\n{}end-of-{}\n",
                                           kSeconds, shell, kMark, script, kMark)));
}

std::string why_unreachable(const std::string& problem) {
  const auto has = [&](const char* part) { return problem.find(part) != std::string::npos; };
  if (has("resolve hostname")) return "its name is unknown here: add it to DNS or /etc/hosts";
  if (has("refused")) return "no SSH server listens there: start sshd on it";
  if (has("Permission denied")) {
    return "SSH must work without a password: run 'ssh-copy-id' for this host";
  }
  if (has("Host key verification")) {
    return "its key is not known here: log in once by 'ssh', or add it by 'ssh-keyscan'";
  }
  if (has("No route") || has("unreachable") || has("timed out") || has("no answer")) {
    return "it is down, or the network or a firewall between is closed: switch it on, or remove it "
           "from the host file";
  }
  return "mpirun needs SSH without a password to every host";
}

Own own_facts() {
  Own own;
  std::error_code error;
  own.program_path = fs::read_symlink("/proc/self/exe", error).string();
  const ShellResult mpi = run_shell("mpirun --version 2>/dev/null | head -n 1; command -v mpirun");
  const std::string version = mpi.lines.empty() ? "" : mpi.lines.front();
  if (mpi.lines.size() > 1) own.prefix = fs::path(mpi.lines.back()).parent_path().parent_path();
  const bool hydra = version.find("HYDRA") != std::string::npos;
  const bool prte = version.find("Open MPI) 5") != std::string::npos;
  own.daemon_name = hydra ? "hydra_pmi_proxy" : prte ? "prted" : "orted";
  return own;
}

// A file in the directory of saves, or above it, that exists as long as this does.
class Token {
 public:
  explicit Token(const std::string& save) {
    if (save.empty()) return;
    const fs::path directory = nearest_existing(save);
    path_ = directory / fmt::format(".sluice-host-check-{}", random_id());
    if (!std::ofstream(path_)) {
      throw_error(ErrorCode::kIo, "cannot write into '{}' of --save", directory.string());
    }
  }
  ~Token() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove(path_, ignored);
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void print_table(const std::vector<Answer>& answers, const Own& own) {
  std::size_t width = 4;
  for (const Answer& answer : answers) width = std::max(width, answer.host.size());
  fmt::print("{:<{}}  answers  {:<17}  program\n", "host", width, own.daemon_name);
  for (const Answer& answer : answers) {
    const auto or_dash = [](const std::string& text) { return text.empty() ? "-" : text; };
    fmt::print("{:<{}}  {:<7}  {:<17}  {}\n", answer.host, width, answer.reached ? "yes" : "no",
               or_dash(answer.says("daemon")), or_dash(answer.says("program")));
  }
}

// What is wrong with a host, with what to do.
std::vector<std::string> problems_of(const Answer& answer, const Own& own) {
  if (!answer.reached) {
    return {fmt::format("{} cannot be reached ({}): {}", answer.host, answer.problem,
                        why_unreachable(answer.problem))};
  }
  std::vector<std::string> problems;
  const auto add = [&]<typename... Args>(fmt::format_string<Args...> format, Args&&... args) {
    problems.push_back(answer.host + ": " + fmt::format(format, std::forward<Args>(args)...));
  };
  const std::string mpi = answer.says("mpi"), our_mpi = own.here.says("mpi");
  if (answer.says("daemon").empty() && !answer.says("prefix").empty()) {
    add("'{}' is installed, but not on the PATH of a non-interactive SSH session: start with "
        "'mpirun --prefix {}'",
        own.daemon_name, own.prefix);
  } else if (answer.says("daemon").empty()) {
    add("MPI is not installed ('{}' is not found): install {} there", own.daemon_name,
        our_mpi.empty() ? "it" : our_mpi);
  } else if (mpi != our_mpi) {
    add("its MPI is '{}', this host's is '{}': install one version on every host", mpi, our_mpi);
  }
  const std::string program = answer.says("program"), ours = own.here.says("program");
  if (program.empty()) {
    add("there is no program at {}: copy it there, or start it from a directory that all hosts "
        "share",
        own.program_path);
  } else if (program != ours) {
    add("the program at {} is '{}', this host's is '{}': copy one to every host", own.program_path,
        program, ours);
  }
  const std::string data = answer.says("data"), our_data = own.here.says("data");
  if (data == "missing") {
    add("the file of --data is missing: copy it to the same path");
  } else if (data != our_data) {
    add("the file of --data differs ({}; here {}): copy it again", data, our_data);
  }
  if (answer.says("save") == "unseen") {
    add("it does not see the directory of --save: use one that all hosts share, or --save-local");
  }
  return problems;
}

}  // namespace

void check_hosts(const HostCheckOptions& options) {
  const std::vector<HostLine> hosts = read_host_file(options.hosts);
  Own own = own_facts();
  const Token token(options.save);
  const std::string data = options.data.empty() ? "" : fs::absolute(options.data).string();
  const std::string script = questions(own, data, token.path());
  own.here = ask("localhost", options.ssh, script);
  if (own.here.says("data") == "missing") {
    throw_error(ErrorCode::kData, "the file of --data, '{}', is missing here", options.data);
  }
  std::vector<std::future<Answer>> asked;
  asked.reserve(hosts.size());
  for (const HostLine& host : hosts) {
    asked.push_back(std::async(std::launch::async, ask, host.name, options.ssh, script));
  }
  std::vector<Answer> answers;
  for (std::future<Answer>& answer : asked) answers.push_back(answer.get());
  print_table(answers, own);
  fmt::print("\nWhat looks wrong, and what to do:\n");
  std::size_t wrong = 0;
  for (const Answer& answer : answers) {
    const std::vector<std::string> problems = problems_of(answer, own);
    for (const std::string& problem : problems) fmt::print("  ! {}\n", problem);
    wrong += problems.empty() ? 0 : 1;
  }
  if (wrong > 0) {
    throw_error(ErrorCode::kPeer, "{} of {} hosts are not ready for a job", wrong, hosts.size());
  }
  fmt::print("  nothing\n");
}

}  // namespace sluice
