// `sluice doctor --hosts`, with a script in place of ssh that plays the hosts.
#include "tests/runtime/program/cli/cli_tools.hpp"

namespace sluice::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class HostCheckTest : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    // The arguments are those of ssh: options, the host, the command.
    write("ssh",
          "#!/bin/sh\n"
          "while [ \"$1\" = -o ]; do shift 2; done\n"
          "host=$1; shift\n"
          "case $host in\n"
          "good*) exec \"$@\" ;;\n"
          "bare) PATH=/nowhere exec /bin/sh -s ;;\n"
          "elsewhere) sed 's#" SLUICE_PROGRAM
          "#/no/program#' | exec \"$@\" ;;\n"
          "refused) echo \"ssh: connect to host refused port 22: Connection refused\" >&2; exit "
          "255 ;;\n"
          "locked) echo 'root@locked: Permission denied (publickey,password).' >&2; exit 255 ;;\n"
          "noisy) echo 'Welcome!'; exec \"$@\" ;;\n"
          "esac\n");
    fs::permissions(path("ssh"), fs::perms::owner_all);
  }
  Outcome check(const std::string& hosts, const std::string& more = "") {
    write("hosts", hosts);
    return sluice("doctor --hosts hosts --ssh ./ssh " + more);
  }
};

TEST_F(HostCheckTest, FindsNothingWhereEveryHostIsReady) {
  const Outcome outcome = check("good1 slots=4\n# good9\n\ngood2:2 # two\nnoisy\nnoisy\n");
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  EXPECT_EQ(lines_with(outcome.out, "  yes  "), 3) << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("What looks wrong, and what to do:\n  nothing\n"));
}

TEST_F(HostCheckTest, NamesEachHostThatIsNotReadyAndTheCure) {
  const Outcome outcome = check("good1\nrefused\nlocked\nbare\nelsewhere\n");
  EXPECT_EQ(outcome.code, 11);
  EXPECT_THAT(outcome.out, HasSubstr("! refused cannot be reached (ssh: connect to host refused "
                                     "port 22: Connection refused): no SSH server listens"));
  EXPECT_THAT(outcome.out, HasSubstr("! locked cannot be reached (root@locked: Permission denied"));
  EXPECT_THAT(outcome.out, HasSubstr("ssh-copy-id"));
  EXPECT_THAT(outcome.out, HasSubstr("! bare: "));
  EXPECT_THAT(outcome.out, HasSubstr("mpirun --prefix"));
  EXPECT_THAT(outcome.out, HasSubstr("! elsewhere: there is no program at " SLUICE_PROGRAM));
  EXPECT_THAT(outcome.out, Not(HasSubstr("! good1")));
  EXPECT_THAT(error_line(outcome.err), HasSubstr("4 of 5 hosts are not ready for a job"));
}

TEST_F(HostCheckTest, RefusesAHostFileThatNamesNoHosts) {
  for (const char* text : {"", "# only a comment\n", "-oProxyCommand=x\n", "a;b\n", "$(id)\n"}) {
    const Outcome outcome = check(text);
    EXPECT_EQ(outcome.code, 3) << text;
    EXPECT_THAT(error_line(outcome.err), HasSubstr("host file 'hosts'")) << text;
  }
  expect_refusal(sluice("doctor --hosts none"), 3, "cannot read file 'none': No such file");
}

TEST_F(HostCheckTest, IsRefusedUnderMpirun) {
  write("hosts", "good1\n");
  expect_refusal(mpirun(2, SLUICE_PROGRAM, "doctor --hosts hosts"), 2, "started without mpirun");
}

}  // namespace
}  // namespace sluice::testing
