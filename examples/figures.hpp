// Pictures of a training: a curve, and how often which class was taken for which.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace figures {

struct Svg {
  Svg(const std::string& path, int width, int height) : file(path) {
    print(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
        "font-family=\"DejaVu Sans, Arial, sans-serif\" font-size=\"11\">\n"
        "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
        width, height);
  }
  ~Svg() { file << "</svg>\n"; }
  template <typename... Values>
  void print(const char* format, Values... values) {
    char line[512];
    std::snprintf(line, sizeof(line), format, values...);
    file << line;
  }
  void text(double x, double y, const std::string& words, const char* anchor = "middle") {
    print("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor,
          words.c_str());
  }
  std::ofstream file;
};

// shares[i], each 0 to 1, after i + 1 epochs.
inline void curve(const std::string& path, const std::string& title,
                  const std::vector<double>& shares) {
  constexpr double kLeft = 60, kTop = 40, kWide = 400, kHigh = 220;
  Svg svg(path, 500, 310);
  const double low = std::min(0.8, *std::min_element(shares.begin(), shares.end()));
  const auto x = [&](std::size_t i) {
    return kLeft + kWide * double(i) / double(std::max<std::size_t>(shares.size() - 1, 1));
  };
  const auto y = [&](double share) { return kTop + kHigh * (1 - share) / (1 - low); };
  svg.text(kLeft + kWide / 2, 20, title);
  for (double share = 1; share >= low; share -= 0.05) {
    svg.print("<path d=\"M%.1f %.1fh%.1f\" stroke=\"#ddd\"/>\n", kLeft, y(share), kWide);
    svg.text(kLeft - 6, y(share) + 4, std::to_string(std::lround(share * 100)).append(" %"), "end");
  }
  std::string path_of_points;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    svg.print("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"#2654a0\"/>\n", x(i), y(shares[i]));
    svg.text(x(i), kTop + kHigh + 18, std::to_string(i + 1));
    path_of_points += i == 0 ? 'M' : 'L';
    path_of_points += std::to_string(x(i)).append(" ").append(std::to_string(y(shares[i])));
  }
  svg.file << "<path d=\"" << path_of_points << "\" fill=\"none\" stroke=\"#2654a0\"/>\n";
  svg.text(kLeft + kWide / 2, kTop + kHigh + 38, "epochs");
}

// counts[wanted][answered].
inline void confusion(const std::string& path, const std::vector<std::string>& names,
                      const std::vector<std::vector<int>>& counts) {
  constexpr double kLeft = 100, kTop = 40, kCell = 44;
  const int side = int(kCell) * int(names.size());
  Svg svg(path, side + 120, side + 90);
  for (std::size_t row = 0; row < names.size(); ++row) {
    const double y = kTop + kCell * double(row);
    const int all = std::max(1, *std::max_element(counts[row].begin(), counts[row].end()));
    svg.text(kLeft - 6, y + kCell / 2 + 4, names[row], "end");
    svg.text(kLeft + kCell * (double(row) + 0.5), kTop - 8, names[row].substr(0, 7));
    for (std::size_t column = 0; column < names.size(); ++column) {
      const int count = counts[row][column], light = 255 - 200 * count / all;
      const double x = kLeft + kCell * double(column);
      svg.print(
          "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" "
          "fill=\"rgb(%d,%d,255)\" stroke=\"#fff\"/>\n",
          x, y, kCell, kCell, light, light);
      if (count > 0) svg.text(x + kCell / 2, y + kCell / 2 + 4, std::to_string(count));
    }
  }
  svg.text(kLeft + side / 2.0, kTop + side + 24, "rows: what it is; columns: what was answered");
}

}  // namespace figures
