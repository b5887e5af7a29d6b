// Runs the program as a user does, in a directory of its own, and looks at what it says.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace sluice::testing {

namespace fs = std::filesystem;
struct Outcome {
  int code = -1;
  std::string out, err;
};

inline std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

inline int lines_with(const std::string& text, const std::string& part) {
  std::istringstream in(text);
  int count = 0;
  for (std::string line; std::getline(in, line);) {
    count += line.find(part) != std::string::npos ? 1 : 0;
  }
  return count;
}

// Sluice's line on standard error, wherever it stands: the MPI library may print lines of its own
// first. "" where there is none.
inline std::string error_line(const std::string& err) {
  std::istringstream in(err);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("sluice: error: ")) return line;
  }
  return "";
}

// A directory of its own for each test; $DIR in a command stands for it.
class CliTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "sluice_cli_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    write("text.txt", std::string(4000, 'a'));
  }
  void TearDown() override { fs::remove_all(directory_); }

  fs::path path(const std::string& name) const { return directory_ / name; }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  // A shell command; a hang ends after half a minute with code 124.
  Outcome shell(const std::string& command) const {
    const std::string line = "cd '" + directory_.string() + "' && exec timeout 30 " + command +
                             " > '.out' 2> '.err' < /dev/null";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(path(".out")),
            read_file(path(".err"))};
  }
  Outcome sluice(const std::string& arguments) const {
    return shell(std::string(SLUICE_PROGRAM) + " " + arguments);
  }
  Outcome mpirun(int ranks, const std::string& program, const std::string& arguments) const {
    return shell(std::string("env " SLUICE_MPI_ENVIRONMENT " " SLUICE_MPIEXEC " --timeout 25 -n ") +
                 std::to_string(ranks) + " " + program + " " + arguments);
  }
  // A job of two ranks with a command line each. A script asks which is whose: Debian 13's mpirun
  // (5.0.7) crashes on two commands with a colon between them.
  Outcome mpirun_beside(const std::string& first, const std::string& second) const {
    write(".beside.sh", "case $OMPI_COMM_WORLD_RANK in\n0) exec " + first + " ;;\n*) exec " +
                            second + " ;;\nesac\n");
    return mpirun(2, "sh", ".beside.sh");
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      const std::string name = entry.path().filename().string();
      if (name[0] != '.') names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  fs::path directory_;
};

// Of text.txt, unless `more` names the data.
inline std::string small(const std::string& more) {
  const char* data = more.find("--data ") == std::string::npos ? "--data text.txt " : "";
  return std::string("train ") + data + "--layers 2 --heads 2 --width 16 --context 16 --steps 2 " +
         more;
}

inline void expect_refusal(const Outcome& outcome, int code, const std::string& part) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
  EXPECT_THAT(error_line(outcome.err), ::testing::HasSubstr(part)) << outcome.err;
  EXPECT_THAT(outcome.out, ::testing::IsEmpty());
}

}  // namespace sluice::testing
